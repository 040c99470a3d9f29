"""ReMax: its numbers by hand, and steps on the tiny model."""

import json

import pytest
import torch
from rlcore_plugin_remax import ReMax, ReMaxConfig, remax_advantages, remax_loss

from rlcore import DataProto, Ragged
from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = [
    "algo=remax",
    "cluster=in_process",
    "tracker=none",
    "data.max_rows=128",
    "data.batch_size=3",
    "rollout.response_len=6",
]

COUNTING = """
from rlcore import RewardSpec

def count(prompt, response, answer):
    return [float(len(prompt))] * len(prompt)

score = RewardSpec("count", count, batched=True)
"""


def run(folder, *overrides):
    """Run a small training in this process; return its exit status and the metrics of its steps."""
    small = [*SMALL, "trainer.total_steps=2", "trainer.eval_every=0", f"run.dir={folder / 'run'}"]
    status = main(["train", *small, *overrides])
    file = folder / "run" / "metrics.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_advantages_by_hand():
    """Gains 1 - 0.5 and 0 - 0.5. The KLs are 1, none, 0.5 and 0, 2: from each token on 1.5, -, 0.5 and 2, 2."""
    batch = DataProto.from_dict(
        {
            "scores": torch.tensor([1.0, 0.0]),
            "remax_baseline": torch.tensor([0.5, 0.5]),
            "response_mask": Ragged.from_list([[1, 0, 1], [1, 1]]),
            "old_log_probs": Ragged.from_list([[-1.0, -9.0, -2.0], [-1.0, -1.0]]),
            "ref_log_probs": Ragged.from_list([[-2.0, 0.0, -2.5], [-1.0, -3.0]]),
        }
    )
    first, second = remax_advantages(batch, kl_coef=0.1)["advantages"]
    torch.testing.assert_close(first, torch.tensor([0.5 - 0.15, 0.0, 0.5 - 0.05]))
    torch.testing.assert_close(second, torch.tensor([-0.5 - 0.2, -0.5 - 0.2]))
    plain = batch.select(["scores", "remax_baseline", "response_mask"], [], [])
    first, second = remax_advantages(plain, kl_coef=0.0)["advantages"]
    assert (first.tolist(), second.tolist()) == ([0.5, 0.0, 0.5], [-0.5, -0.5])


def test_loss_by_hand():
    """Minus (0.5 * -1 + 1 * -2) = 2.5, and minus (-1 * -4) = -4; over two responses, -1.5 / 2."""
    log_probs = torch.tensor([[-1.0, -9.0, -2.0], [-4.0, -7.0, -7.0]], requires_grad=True)
    batch = {
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        "advantages": torch.tensor([[0.5, 3.0, 1.0], [-1.0, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.0, -9.0, -2.0], [-4.0, 0.0, 0.0]]),
        "ref_log_probs": torch.tensor([[-1.5, -1.0, -2.0], [-3.0, 0.0, 0.0]]),
    }
    entropy = torch.tensor([[1.0, 50.0, 2.0], [3.0, 50.0, 50.0]])
    terms = remax_loss(Outputs({"log_probs": log_probs, "entropy": entropy}), batch, ReMaxConfig())
    policy = terms["policy"]
    assert (policy.total.item(), policy.count, policy.weight) == (-1.5, 2, 1.0)
    # Descent raises tokens that did better than the greedy response, lowers the others, and leaves masked ones alone.
    (gradient,) = torch.autograd.grad(policy.total, log_probs)
    assert gradient.tolist() == [[-0.5, 0.0, -1.0], [1.0, 0.0, 0.0]]
    assert (terms["entropy"].total.item(), terms["entropy"].count, terms["entropy"].weight) == (6.0, 3, None)
    assert (terms["kl"].total.item(), terms["kl"].count, terms["kl"].weight) == (0.5 + 0 - 1, 3, None)
    assert "kl" not in remax_loss(Outputs({"log_probs": log_probs, "entropy": entropy}), batch, ReMaxConfig(kl_coef=0))


@pytest.mark.e2e
def test_the_greedy_rollout_is_scored_apart_from_the_samples(tmp_path):
    """The reward is the number of rows scored at once: 6 samples of 3 prompts, then 3 greedy responses."""
    (tmp_path / "counting.py").write_text(COUNTING)
    status, steps = run(tmp_path, f"reward.path={tmp_path / 'counting.py'}:score", "algo.samples=2")
    assert status == 0
    for step in steps:
        assert step["remax/greedy_score"] == 3
        assert (step["reward/mean"], step["reward/std"]) == (6, 0)
        assert step["train/optimizer_steps"] == 1
    # Each response is 3 better than the greedy one, so the loss is -3 times the mean log-prob of a response.
    assert steps[0]["loss/policy"] > 0
    assert steps[0]["loss/kl"] == pytest.approx(0, abs=1e-5)


def test_the_baseline_is_greedy_so_no_seed_changes_it(tmp_path):
    """The prompts come in the file's order, the reward reads the text: samples differ by the seed, baselines do not."""
    rows = [{"prompt": f"{n}{n}+{n}=", "answer": "0"} for n in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "texts.py").write_text("def score(prompt, response, answer):\n    return sum(map(ord, response)) / 7\n")
    same = ["data=file", f"data.path={tmp_path / 'rows.jsonl'}", "data.shuffle=false", "rollout.temperature=2"]
    same += [f"reward.path={tmp_path / 'texts.py'}:score", "algo.samples=2"]
    found = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        status, steps = run(tmp_path / str(seed), *same, f"trainer.seed={seed}")
        assert status == 0
        found.append(steps[0])
    assert found[0]["remax/greedy_score"] == found[1]["remax/greedy_score"]
    assert found[0]["reward/mean"] != found[1]["reward/mean"]


def test_no_reference_without_kl():
    assert set(ReMax(ReMaxConfig()).roles()) == {"actor", "ref"}
    assert set(ReMax(ReMaxConfig(kl_coef=0.0)).roles()) == {"actor"}


@pytest.mark.parametrize(
    ("override", "message"),
    [("rollout.temperature=0", "rollout.temperature=0"), ("algo.samples=0", "samples"), ("algo.kl_coef=-1", "kl_coef")],
)
def test_settings_that_cannot_be_are_refused(tmp_path, capsys, override, message):
    status, _ = run(tmp_path, override)
    assert status != 0
    assert message in capsys.readouterr().err
