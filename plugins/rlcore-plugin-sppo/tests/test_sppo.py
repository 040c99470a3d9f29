"""SPPO: win rates and the loss by hand, and steps on the tiny model."""

import json

import pytest
import torch
from rlcore_plugin_sppo import SPPOConfig, best_and_worst, sppo_loss, win_rates

from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = ["algo=sppo", "cluster=in_process", "tracker=none", "data.batch_size=4", "rollout.response_len=6"]


def run(folder, *overrides):
    small = [*SMALL, "trainer.total_steps=6", "trainer.eval_every=0", f"run.dir={folder / 'run'}"]
    status = main(["train", *small, *overrides])
    file = folder / "run" / "metrics.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_win_rates_count_ties_as_half_and_stay_within_the_group():
    """Of a's scores 3, 1, 1 the first wins both comparisons; the others lose one and tie. b's two tie; c is alone."""
    uid = ["a", "b", "a", "a", "b", "c"]
    scores = torch.tensor([3.0, 9.0, 1.0, 1.0, 9.0, 5.0])
    none = torch.zeros(6, dtype=torch.bool)
    assert win_rates(scores, uid, none).tolist() == [1.0, 0.5, 0.25, 0.25, 0.5, 0.5]


def test_a_failed_reward_neither_wins_nor_loses():
    """The first row's score of 0 is no score: both of its comparisons are ties, and the others' with it too."""
    failed = torch.tensor([True, False, False])
    assert win_rates(torch.tensor([0.0, 1.0, 2.0]), ["a"] * 3, failed).tolist() == [0.5, 0.25, 0.75]


def test_best_and_worst_of_each_group():
    uid = ["a", "b", "a", "a", "b"]
    rates = torch.tensor([0.25, 0.5, 1.0, 0.25, 0.5])
    assert best_and_worst(rates, uid) == [0, 2, 1]  # of b's equal rates one row is both


def test_loss_by_hand():
    """The log-ratios are 0.5 + 0.25 = 0.75 and -1; with eta 4 they should be 4 * 0.5 = 2 and 4 * -0.25 = -1."""
    log_probs = torch.tensor([[-1.0, -9.0, -2.0], [-4.0, -7.0, -7.0]], requires_grad=True)
    batch = {
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        "old_log_probs": torch.tensor([[-1.5, -1.0, -2.25], [-3.0, -7.0, -7.0]]),
        "advantages": torch.tensor([0.5, -0.25]),
    }
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones(2, 3)})
    terms = sppo_loss(out, batch, SPPOConfig(eta=4.0))
    policy = terms["policy"]
    assert (policy.total.item(), policy.count, policy.weight) == ((0.75 - 2) ** 2, 2, 1.0)
    # Descent raises the winner up to its aim; the loser is where it should be, and masked tokens are left alone.
    (gradient,) = torch.autograd.grad(policy.total, log_probs)
    assert gradient.tolist() == [[-2.5, 0.0, -2.5], [0.0, 0.0, 0.0]]
    assert terms["log_ratio"].total.item() == 0.75 + 1


@pytest.mark.e2e
@pytest.mark.parametrize("keep", ["all", "best_worst"])
def test_steps_raise_the_reward(tmp_path, keep):
    """The reward is the share of the digit 7, which a policy that learns by it says ever more often."""
    (tmp_path / "sevens.py").write_text(
        "def score(prompt, response, answer):\n    return response.count('7') / max(len(response), 1)\n"
    )
    settings = [f"reward.path={tmp_path / 'sevens.py'}:score", "engine.lr=1e-3", f"algo.keep={keep}"]
    status, steps = run(tmp_path, *settings)
    assert status == 0
    assert all(step["train/optimizer_steps"] == 1 for step in steps)
    first, last = (sum(step["reward/mean"] for step in part) / 2 for part in (steps[:2], steps[-2:]))
    assert last > first + 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.group_size=1", "group_size"),
        ("algo.eta=0", "eta"),
        ("rollout.temperature=0", "makes a prompt's responses equal, so nothing is learned"),
        ("algo.mini_batches=5", "algo.mini_batches is 5, but a step has only data.batch_size = 4 groups"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, capsys, override, message):
    status, _ = run(tmp_path, override)
    assert status != 0
    assert message in capsys.readouterr().err
