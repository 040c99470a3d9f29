"""Safe RLHF: its numbers by hand, and steps on the tiny model."""

import json
import math
from importlib.resources import files

import pytest
import torch
from rlcore_plugin_safe_rlhf import (
    SafeRLHF,
    SafeRLHFConfig,
    estimate,
    mixed_advantages,
    next_log_lambda,
    policy_loss,
    ptx_loss,
    value_loss,
)

from rlcore import DataProto, Ragged
from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = [
    "algo=safe_rlhf",
    "cluster=in_process",
    "tracker=none",
    "data.max_rows=128",
    "data.batch_size=4",
    "rollout.response_len=6",
]


def run(folder, *overrides):
    """Run a small training in this process; return its exit status and the metrics of its steps."""
    small = [*SMALL, "trainer.total_steps=2", "trainer.eval_every=0", f"run.dir={folder / 'run'}"]
    status = main(["train", *small, *overrides])
    file = folder / "run" / "metrics.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def by_function(tmp_path):
    """Return the overrides of a run whose cost is 1 for a response with a 1 in it."""
    file = tmp_path / "costs.py"
    file.write_text("def ones(prompt, response, answer):\n    return float('1' in response)\n")
    return [f"reward.functions={{arithmetic: 1, {file}\\:ones: 0}}", f'algo.cost_function="{file}:ones"']


@pytest.mark.parametrize(
    ("before", "mean_cost", "after"),
    [
        (1.0, 0.7, 0.0 + 0.1 * 1 * 0.5),  # above the limit of 0.2 it grows
        (2.0, 0.0, math.log(2) - 0.1 * 2 * 0.2),  # below it falls, by its own size
        (1.0, 0.2, 0.0),
        (4.0, 9.0, math.log(5)),  # not beyond lambda_max
    ],
)
def test_lambda_follows_the_excess_of_the_cost(before, mean_cost, after):
    config = SafeRLHFConfig(cost_limit=0.2, lambda_lr=0.1, lambda_max=5.0)
    assert next_log_lambda(math.log(before), mean_cost, config) == pytest.approx(after)


def test_lambda_is_state_that_json_holds():
    algorithm, resumed = SafeRLHF(SafeRLHFConfig(lambda_init=3.0)), SafeRLHF(SafeRLHFConfig())
    assert algorithm.log_lambda == math.log(3)
    resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert resumed.log_lambda == algorithm.log_lambda


def test_a_costly_token_is_worth_less_the_larger_lambda():
    """(2 - 3 * 1) / 4 = -0.25 and (1 - 3 * -1) / 4 = 1; with lambda = 0 it is the reward's advantage."""
    of_reward, of_cost = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, -1.0]])
    assert mixed_advantages(of_reward, of_cost, 3.0).tolist() == [[-0.25, 1.0]]
    assert mixed_advantages(of_reward, of_cost, 0.0).tolist() == [[2.0, 1.0]]


def test_rewards_costs_and_advantages_by_hand():
    """One response of two actions with a token between them that is none; score 1, cost 2, kl_coef / 2 = 0.1.

    The KLs are 1 and 3, so r = -0.1, 1 - 0.3 and c = 0.1, 2 + 0.3. With gamma = lam = 1 returns are what is to come:
    R = 0.6, 0.7 and R^c = 2.4, 2.3. Minus the values 0.5, 0.5 and 2, 2 that is A^r = 0.1, 0.2 and A^c = 0.4, 0.3, and
    with lambda = 1 the advantages are -0.15 and -0.05.
    """
    batch = DataProto.from_dict(
        {
            "scores": torch.tensor([1.0]),
            "safe_rlhf_cost": torch.tensor([2.0]),
            "response_mask": Ragged.from_list([[1, 0, 1]]),
            "values": Ragged.from_list([[0.5, 9.0, 0.5]]),
            "safe_rlhf_cost_values": Ragged.from_list([[2.0, 9.0, 2.0]]),
            "old_log_probs": Ragged.from_list([[-1.0, -9.0, -1.0]]),
            "ref_log_probs": Ragged.from_list([[-2.0, 0.0, -4.0]]),
        }
    )
    made = estimate(batch, config=SafeRLHFConfig(kl_coef=0.2, gamma=1.0, lam=1.0), multiplier=1.0)
    torch.testing.assert_close(made["returns"][0], torch.tensor([0.6, 0.0, 0.7]))
    torch.testing.assert_close(made["safe_rlhf_cost_returns"][0], torch.tensor([2.4, 0.0, 2.3]))
    torch.testing.assert_close(made["advantages"][0], torch.tensor([-0.15, 0.0, -0.05]))
    # Without the KL: R = 1, 1 and R^c = 2, 2, so that A^r = 0.5, 0.5 and A^c = 0, 0.
    made = estimate(batch, config=SafeRLHFConfig(kl_coef=0.0, lam=1.0), multiplier=1.0)
    torch.testing.assert_close(made["advantages"][0], torch.tensor([0.25, 0.0, 0.25]))


def test_policy_loss_by_hand():
    """Advantage 2: ratio 1.5 counts as 1.2. Advantage -1: 1.5 counts as itself, and 0.5 as 0.8."""
    ratio, old = torch.tensor([[1.5, 9.0], [1.5, 0.5]]), torch.tensor([[-1.0, -2.0], [-1.5, -0.5]])
    log_probs = (old + ratio.log()).requires_grad_()
    batch = {
        "response_mask": torch.tensor([[1, 0], [1, 1]]),
        "advantages": torch.tensor([[2.0, 5.0], [-1.0, -1.0]]),
        "old_log_probs": old,
        "ref_log_probs": log_probs.detach() - 0.5,
    }
    terms = policy_loss(Outputs({"log_probs": log_probs, "entropy": torch.ones(2, 2)}), batch, SafeRLHFConfig())
    assert terms["policy"].total.item() == pytest.approx(-2.4 + 1.5 + 0.8)
    assert (terms["policy"].count, terms["policy"].weight) == (3, 1.0)
    (gradient,) = torch.autograd.grad(terms["policy"].total, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0], [1.5, 0.0]]))
    assert (terms["clipped"].total, terms["entropy"].total) == (2, 3)
    assert terms["kl"].total.item() == pytest.approx(1.5)
    assert {name for name, term in terms.items() if term.weight is not None} == {"policy"}


def test_pretraining_loss_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0], [-4.0, -9.0]], requires_grad=True)
    term = ptx_loss(Outputs({"log_probs": log_probs}), {"response_mask": torch.tensor([[1, 1], [1, 0]])}, None)["ptx"]
    assert (term.total.item(), term.count, term.weight) == (7.0, 3, 1.0)
    (gradient,) = torch.autograd.grad(term.total, log_probs)
    assert gradient.tolist() == [[-1.0, -1.0], [-1.0, 0.0]]


@pytest.mark.parametrize(
    ("value_clip", "total", "slope"),
    [
        (0.5, (4 + 6.25) / 2, [[-2.0, 0.0, 0.0]]),  # 1 counts as 0.5, whose error of 2.5 is the larger one
        (0.0, (4 + 4) / 2, [[-2.0, -2.0, 0.0]]),
    ],
)
def test_value_loss_by_hand(value_clip, total, slope):
    """Both returns are 2 above the new values. One value has not moved, the other has moved by 1."""
    values = torch.tensor([[1.0, 1.0, 7.0]], requires_grad=True)
    batch = {
        "response_mask": torch.tensor([[1, 1, 0]]),
        "values": torch.tensor([[1.0, 0.0, 0.0]]),
        "returns": torch.tensor([[3.0, 3.0, 0.0]]),
    }
    terms = value_loss(Outputs({"values": values}), batch, SafeRLHFConfig(value_clip=value_clip))
    assert terms["value_loss"].total.item() == pytest.approx(total)
    assert (terms["value_loss"].count, terms["value_loss"].weight) == (2, 1.0)
    (gradient,) = torch.autograd.grad(terms["value_loss"].total, values)
    assert gradient.tolist() == slope
    assert (terms["value"].total, terms["return"].total) == (2, 6)


@pytest.mark.e2e
def test_steps_with_a_cost_function_and_demonstrations(tmp_path, by_function):
    """A tenth of the 10 demonstrations is held out; the same 9 in both steps, so their loss has to fall."""
    rows = [{"prompt": f"{i}+2=", "response": str(i + 2)} for i in range(10)]
    (tmp_path / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"algo.ptx_path={tmp_path / 'ptx.jsonl'}", "algo.ptx_batch_size=9", "algo.cost_limit=0.1"]
    status, steps = run(tmp_path, *by_function, *options, "algo.lambda_lr=0.5", "algo.samples=2", "engine.lr=1e-4")
    assert status == 0
    log_lambda = 0.0
    for step in steps:
        assert step["safe_rlhf/cost"] == pytest.approx(step["reward/costs.ones"])
        assert step["reward/mean"] == step["reward/arithmetic"]  # the cost adds nothing to the reward
        log_lambda += 0.5 * math.exp(log_lambda) * (step["safe_rlhf/cost"] - 0.1)
        assert step["safe_rlhf/lambda"] == pytest.approx(math.exp(log_lambda))
        for critic in ("critic", "cost_critic"):
            assert step[f"{critic}/value_loss"] > 0
            assert step[f"{critic}/optimizer_steps"] == 1
        assert step["train/optimizer_steps"] == 1  # the policy's loss and the demonstrations' share it
    assert steps[0]["loss/kl"] == pytest.approx(0, abs=1e-5)
    assert steps[0]["critic/value"] == steps[0]["cost_critic/value"] == 0  # both heads start with zeros
    assert 0 <= steps[0]["cost_critic/return"] <= 1
    assert steps[1]["loss/ptx"] < steps[0]["loss/ptx"]


@pytest.mark.timeout(200)
@pytest.mark.e2e
def test_steps_with_a_cost_model_and_with_a_reward_model_beside_a_cost_function(tmp_path, by_function):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny, folder = str(files("rlcore.assets") / "tiny"), str(tmp_path / "scorer")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    status, (step,) = run(tmp_path, f"algo.cost_model={folder}", "algo.kl_coef=0", "trainer.total_steps=1")
    assert status == 0
    assert step["safe_rlhf/cost"] != 0
    assert step["safe_rlhf/lambda"] == pytest.approx(math.exp(0.1 * step["safe_rlhf/cost"]))
    assert "loss/kl" not in step
    assert "loss/ptx" not in step

    cost_alone = by_function[0].replace("arithmetic: 1, ", "")
    options = [cost_alone, by_function[1], f"reward.model={folder}", "trainer.total_steps=1"]
    status, (step,) = run(tmp_path / "model", *options)
    assert status == 0
    assert step["safe_rlhf/cost"] == pytest.approx(step["reward/costs.ones"])
    assert step["reward/mean"] == pytest.approx(step["reward/model"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "either algo.cost_model=FOLDER"),
        (["algo.cost_model=x", "algo.cost_function=y"], "not both"),
        (["algo.cost_function=gsm8k_flexible"], "must be one of reward.functions and have the weight 0"),
        (["reward.functions={arithmetic: 1}", "algo.cost_function=arithmetic"], "reward.functions={arithmetic: 1}"),
        (["algo.cost_model=x", "algo.lambda_init=6"], "algo.lambda_init=6 is above algo.lambda_max=5"),
        (["algo.cost_model=x", "algo.ptx_path=none.jsonl"], "algo.ptx_path=none.jsonl: there is no such file"),
        (["algo.cost_model=x"], "the model of role 'cost_model', x does not exist"),
        (["algo.cost_model=x", "algo.lambda_init=0"], "lambda_init"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, capsys, overrides, message):
    status, _ = run(tmp_path, *overrides)
    assert status != 0
    assert message in capsys.readouterr().err
