"""DAPO: its numbers by hand, and steps on the tiny model."""

import json
import math

import pytest
import torch
from rlcore_plugin_dapo import DAPOConfig, dapo_loss, differing, overlong_penalty, shaped_scores

from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = [
    "algo=dapo",
    "cluster=in_process",
    "tracker=none",
    "data.max_rows=128",
    "data.batch_size=4",
    "algo.group_size=2",
]

ODD_ALONE = """
from rlcore import RewardSpec

def odd_alone(prompt, response, answer):
    return [float(row % 2 and sum(map(ord, text)) % 3 == 0) for row, text in enumerate(prompt)]

score = RewardSpec("odd_alone", odd_alone, batched=True)
"""


def run(folder, *overrides):
    """Run a small training in this process; return its exit status and the metrics of its steps."""
    small = [*SMALL, "rollout.response_len=6", "trainer.eval_every=0", f"run.dir={folder / 'run'}"]
    status = main(["train", *small, "trainer.total_steps=2", *overrides])
    file = folder / "run" / "metrics.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.25, [0.0, 0.0, -0.2, -0.6, -1.0]),  # the last 5 of 20 tokens
        (1.0, [-0.5, -0.75, -0.8, -0.9, -1.0]),
        (0.0, [0.0] * 5),
    ],
)
def test_overlong_penalty_by_hand(share, expected):
    """Within the buffer it falls in a straight line to -1, at the full length of 20 tokens."""
    penalty = overlong_penalty(torch.tensor([10, 15, 16, 18, 20]), 20, share)
    torch.testing.assert_close(penalty, torch.tensor(expected))


def test_the_penalty_lowers_the_scores_of_long_responses():
    """Half of it counts: at 15, 18 and 20 of 20 tokens, with a buffer of 5, that is 0, -0.3 and -0.5."""
    config = DAPOConfig(overlong_buffer=0.25, overlong_penalty=0.5)
    scores, penalty = shaped_scores(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([15, 18, 20]), 20, config)
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.7, -0.5]))
    torch.testing.assert_close(penalty, torch.tensor([0.0, -0.3, -0.5]))


def test_a_group_differs_as_a_whole():
    """In 0, 0.5, 1 the middle score is the mean, and the row is kept with the others."""
    scores = torch.tensor([0.0, 0.5, 1.0, 0.1, 0.1, 0.1])
    assert differing(scores, ["a", "a", "a", "b", "b", "b"]).tolist() == [True] * 3 + [False] * 3
    assert differing(scores, ["a", "b", "c", "b", "a", "c"]).tolist() == [True] * 6, "groups of any order"
    assert differing(scores[:1], ["a"]).tolist() == [False]
    assert differing(torch.zeros(0), []).tolist() == []


def test_loss_by_hand():
    """Advantage 2: ratio 1.5 counts as 1.28, 0.5 as itself. Advantage -1: 0.5 counts as 0.8, 1.5 as itself, and 1."""
    ratio = torch.tensor([[1.5, 0.5, 9.0], [0.5, 1.5, 1.0]])
    old = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]])
    log_probs = (old + ratio.log()).requires_grad_()
    batch = {
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "advantages": torch.tensor([2.0, -1.0]),
        "old_log_probs": old,
    }
    entropy = torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]])
    terms = dapo_loss(Outputs({"log_probs": log_probs, "entropy": entropy}), batch, DAPOConfig())
    policy = terms["policy"]
    assert policy.total.item() == pytest.approx(-2.56 - 1.0 + 0.8 + 1.5 + 1.0)
    assert (policy.count, policy.weight) == (5, 1.0)  # every token counts the same
    (gradient,) = torch.autograd.grad(policy.total, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.5, 1.0]]))
    assert terms["clipped"].total == 2
    assert terms["entropy"].total == 15
    # KL(old || new) of a token: r - 1 - ln r, over ratios 1.5, 0.5, 0.5, 1.5, 1.
    expected = 2 * (0.5 - math.log(1.5)) + 2 * (math.log(2) - 0.5)
    assert terms["kl_old"].total.item() == pytest.approx(expected, rel=1e-5)
    assert [terms[name].weight for name in ("entropy", "clipped", "kl_old")] == [None] * 3
    # Clip-higher: with the upper bound of the lower one, the first token counts as 1.2.
    narrow = dapo_loss(Outputs({"log_probs": log_probs, "entropy": entropy}), batch, DAPOConfig(clip_high=0.2))
    assert narrow["policy"].total.item() == pytest.approx(-2.4 - 1.0 + 0.8 + 1.5 + 1.0)


@pytest.mark.e2e
def test_prompts_are_drawn_until_the_batch_is_full(tmp_path):
    """A third of the prompts has scores that differ, 0 and 1, so that 4 groups take several rounds of 4 prompts."""
    (tmp_path / "odd_alone.py").write_text(ODD_ALONE)
    options = [f"reward.path={tmp_path / 'odd_alone.py'}:score", "algo.max_rounds=40", "algo.overlong_buffer=0"]
    status, steps = run(tmp_path, *options)
    assert status == 0
    for step in steps:
        assert step["dapo/rounds"] > 1
        assert step["dapo/missing_groups"] == 0
        assert step["dapo/dropped_groups"] + step["dapo/surplus_groups"] + 4 == 4 * step["dapo/rounds"]
        # Health metrics cover all samples, the update only the kept groups.
        assert step["health/equal_groups"] == step["dapo/dropped_groups"] / (4 * step["dapo/rounds"])
        assert (step["train/optimizer_steps"], step["train/skipped_updates"]) == (1, 0)
        assert step["train/grad_norm"] > 0


@pytest.mark.e2e
def test_at_the_bound_it_trains_on_what_there_is_and_says_so(tmp_path, caplog):
    (tmp_path / "none.py").write_text("def score(prompt, response, answer):\n    return 1.0\n")
    options = [f"reward.path={tmp_path / 'none.py'}:score", "algo.max_rounds=2", "trainer.total_steps=1"]
    status, (step,) = run(tmp_path, *options)
    assert status == 0
    assert [step[f"dapo/{name}"] for name in ("rounds", "dropped_groups", "missing_groups")] == [2, 8, 4]
    assert (step["train/optimizer_steps"], step["train/skipped_updates"]) == (0, 1)
    assert "step 1 trains on 0 of 4 groups: in 2 rounds of sampling" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0", "rollout.temperature=0"),
        ("algo.mini_batches=5", "algo.mini_batches is 5"),
        ("algo.group_size=1", "group_size"),
        ("algo.max_rounds=0", "max_rounds"),
        ("algo.overlong_buffer=1.5", "overlong_buffer"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, capsys, override, message):
    status, _ = run(tmp_path, override)
    assert status != 0
    assert message in capsys.readouterr().err
