"""RLOO: its numbers by hand, and steps on the tiny model."""

import json

import pytest
import torch
from rlcore_plugin_rloo import RLOOConfig, response_rewards, rloo_loss

from rlcore import DataProto, Ragged
from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = [
    "algo=rloo",
    "cluster=in_process",
    "tracker=none",
    "data.max_rows=128",
    "data.batch_size=4",
    "rollout.response_len=6",
]


def run(folder, *overrides):
    """Run a small training in this process; return its exit status and the metrics of its steps."""
    small = [*SMALL, "trainer.total_steps=6", "trainer.eval_every=0", f"run.dir={folder / 'run'}"]
    status = main(["train", *small, *overrides])
    file = folder / "run" / "metrics.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_response_is_rewarded_with_its_score_minus_its_kl():
    """The KL is the sum of log-ratios, (-1 + 1.5) + (-2 + 4) = 2.5 without the token that was not sampled, and -1."""
    batch = DataProto.from_dict(
        {
            "scores": torch.tensor([1.0, 0.5]),
            "response_mask": Ragged.from_list([[1, 0, 1], [1]]),
            "old_log_probs": Ragged.from_list([[-1.0, -9.0, -2.0], [-3.0]]),
            "ref_log_probs": Ragged.from_list([[-1.5, -1.0, -4.0], [-2.0]]),
        }
    )
    made = response_rewards(batch, kl_coef=0.5)
    assert made["rloo_kl"].tolist() == [2.5, -1.0]
    assert made["rloo_reward"].tolist() == [-0.25, 1.0]


def test_loss_by_hand():
    """Sequence log-probs are -1 - 2 = -3 and -4; with the advantages 2 and -1 the loss is (6 - 4) / 2 = 1."""
    log_probs = torch.tensor([[-1.0, -9.0, -2.0], [-4.0, -7.0, -7.0]], requires_grad=True)
    batch = {
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        "advantages": torch.tensor([2.0, -1.0]),
        "rloo_kl": torch.tensor([2.5, -1.0]),
    }
    terms = rloo_loss(Outputs({"log_probs": log_probs}), batch, RLOOConfig())
    policy, kl = terms["policy"], terms["kl"]
    assert (policy.total.item(), policy.count, policy.weight) == (2.0, 2, 1.0)
    # Descent raises the response that was better than the others, lowers the worse one, and leaves masked tokens alone.
    (gradient,) = torch.autograd.grad(policy.total, log_probs)
    assert gradient.tolist() == [[-2.0, 0.0, -2.0], [1.0, 0.0, 0.0]]
    assert (kl.total.item(), kl.count, kl.weight) == (1.5, 3, None)


@pytest.mark.e2e
def test_steps_raise_the_reward(tmp_path):
    """The reward is the share of the digit 7, which a policy that learns by it says ever more often."""
    (tmp_path / "sevens.py").write_text(
        "def score(prompt, response, answer):\n    return response.count('7') / max(len(response), 1)\n"
    )
    status, steps = run(tmp_path, f"reward.path={tmp_path / 'sevens.py'}:score", "engine.lr=1e-3")
    assert status == 0
    assert all(step["train/optimizer_steps"] == 1 for step in steps)
    assert steps[0]["loss/kl"] == pytest.approx(0, abs=1e-5)  # the reference is the policy that the run starts from
    first, last = (sum(step["reward/mean"] for step in part) / 2 for part in (steps[:2], steps[-2:]))
    assert last > first + 0.1


@pytest.mark.parametrize("override", ["group_size=1", "kl_coef=-1", "beta=1"])
def test_settings_out_of_range_are_refused(tmp_path, capsys, override):
    status, _ = run(tmp_path, f"algo.{override}")
    assert status != 0
    assert override.split("=")[0] in capsys.readouterr().err
