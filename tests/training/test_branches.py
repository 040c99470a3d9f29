"""An episode counts once, however many branches it has: in its group, in metrics and in the loss; a seat counts alone.

Two episodes of one prompt: the good one (score 1) has three branches, the bad one (score 0) has one.
"""

from types import SimpleNamespace

import pytest
import torch
from rlcore_grpo import GRPO, GRPOConfig
from rlcore_online_dpo import OnlineDPO, OnlineDPOConfig
from rlcore_plugin_gdpo import gdpo_advantages
from rlcore_plugin_maxrl import MaxRL, MaxRLConfig
from rlcore_plugin_pass_at_k import PassAtK, PassAtKConfig
from rlcore_rejection_sampling import choose

from rlcore import DataProto
from rlcore.engine.update.items import Numerics, UpdateItem
from rlcore.engine.update.loss_accumulator import call_loss
from rlcore.ops import Outputs, episodes, group_advantages, leave_one_out, needs, policy_terms
from rlcore.protocol import Ragged
from rlcore.rewards.failures import left_alone, one_score_each
from rlcore.roles.updates import plan_update, row_weights
from rlcore.training.health import step_metrics

NAMES = ["0:0/0"] * 3 + ["0:0/1"]


def forked(scores=(1.0, 1.0, 1.0, 0.0), seat=(0, 0, 0, 0)) -> DataProto:
    rows = len(scores)
    columns = {
        "scores": torch.tensor(scores),
        "reward_error": torch.zeros(rows, dtype=torch.bool),
        "branch": torch.tensor([0, 1, 2, 0]),
        "seat": torch.tensor(seat),
        "prompt_length": torch.full((rows,), 2),
        "response_length": torch.tensor([3, 4, 5, 6]),
        "finished": torch.ones(rows, dtype=torch.bool),
        "responses": Ragged.from_list([torch.arange(row, 2 * row + 1) for row in range(rows)]),
    }
    return DataProto.from_dict(columns, {"uid": ["0:0"] * rows, "episode": NAMES})


def test_an_episode_counts_once_in_its_group():
    batch = forked()
    without_std = GRPO(GRPOConfig(divide_by_std=False)).with_advantages(None, batch)["advantages"]
    assert without_std.tolist() == [0.5, 0.5, 0.5, -0.5]
    with_std = GRPO(GRPOConfig()).with_advantages(None, batch)["advantages"]
    assert with_std.tolist() == pytest.approx([0.5**0.5] * 3 + [-(0.5**0.5)], abs=1e-5), "the deviation of 1 and 0"
    assert leave_one_out(batch["scores"], batch["uid"], episode=episodes(batch)).tolist() == [1, 1, 1, -1]
    # The good episode's length is 4, the mean of its branches: the baseline is 4 / (4 + 6).
    by_length = GRPO(GRPOConfig(divide_by_std=False, baseline="length")).with_advantages(None, batch)["advantages"]
    assert by_length.tolist() == pytest.approx([0.6] * 3 + [-0.4])
    assert MaxRL(MaxRLConfig()).with_advantages(None, batch)["advantages"].tolist() == [1, 1, 1, -1]


def test_a_branch_of_another_reward_adds_to_its_episodes_mean():
    rewards = torch.tensor([0.25, 0.5, 0.75, 0.0])
    assert leave_one_out(rewards, ["a"] * 4, episode=NAMES).tolist() == [0.5, 0.5, 0.5, -0.5]


def test_one_episode_with_branches_has_nothing_to_compare_with():
    scores = torch.tensor([0.1, 0.7, 0.4])
    for found in (
        group_advantages(scores, ["a"] * 3, episode=["e"] * 3),
        leave_one_out(scores, ["a"] * 3, episode=["e"] * 3),
    ):
        assert found.tolist() == [0, 0, 0]
    present, group = torch.tensor([True, True, True, False]), torch.zeros(4, dtype=torch.int64)
    assert left_alone(present, group, NAMES).tolist() == [True, True, True, False]
    assert not left_alone(present, group, ["a", "b", "c", "d"]).any()


def test_rows_without_branches_have_the_numbers_of_rows_bit_for_bit():
    scores = torch.rand(64, generator=torch.Generator().manual_seed(0))
    uid, own = [str(row // 8) for row in range(64)], [str(row) for row in range(64)]
    assert torch.equal(group_advantages(scores, uid, episode=own), group_advantages(scores, uid, episode=None))
    assert torch.equal(leave_one_out(scores, uid, episode=own), leave_one_out(scores, uid, episode=None))


def test_seats_count_as_rows():
    batch = forked(seat=(0, 1, 2, 0))
    advantages = GRPO(GRPOConfig(divide_by_std=False)).with_advantages(None, batch)["advantages"]
    assert advantages.tolist() == [0.25, 0.25, 0.25, -0.75]
    assert row_weights(batch) is None
    assert step_metrics({}, {}, [batch], 1.0)["reward/mean"] == 0.75


def test_the_other_algorithms_count_episodes():
    batch = forked()
    # k = 2 of 2 episodes: the good one adds 1 to the best of two; of four rows it would be another number.
    run = SimpleNamespace(log=lambda *_, **__: None)
    pass_at_k = PassAtK(PassAtKConfig(k=2, group_size=2)).with_advantages(run, batch)["advantages"]
    assert pass_at_k.tolist() == [2, 2, 2, 0]
    assert len(PassAtK(PassAtKConfig(k=3, group_size=3)).with_advantages(run, batch)) == 0, "two episodes, not four"
    weighed = gdpo_advantages(
        [batch["scores"]], [1.0], batch["uid"], divide_by_std=False, lengths=None, episode=episodes(batch)
    )
    assert weighed.tolist() == pytest.approx([0.5**0.5] * 3 + [-(0.5**0.5)], abs=1e-5)
    assert choose(batch, threshold=None, top_k=1)["rejection_kept"].tolist() == [True, True, True, False]
    chosen, rejected = OnlineDPO(OnlineDPOConfig(pairs="all")).choose(run, batch)
    assert (chosen.tolist(), rejected.tolist()) == ([0], [3])


def test_branches_share_the_mean_of_their_scores():
    batch = forked((1.0, 0.0, 0.5, 0.25))
    assert one_score_each(batch, batch)["scores"].tolist() == [0.5, 0.5, 0.5, 0.25]


def test_metrics_count_episodes():
    found = step_metrics({}, {}, [forked()], 1.0)
    assert (found["reward/mean"], found["reward/std"], found["reward/accuracy"]) == (0.5, 0.5, 0.5)
    assert (found["health/equal_groups"], found["health/effective_tokens"]) == (0.0, 18.0)
    alone = forked()[:3]
    assert "health/equal_groups" not in step_metrics({}, {}, [alone], 1.0), "a single sample"


@needs("log_probs", "entropy")
def a_loss(out, batch, config):
    loss = -out.log_probs * batch["advantages"][:, None] * batch["scale"]
    batch = {"response_mask": batch["response_mask"], "old_log_probs": out.log_probs.detach()}
    return policy_terms(out, batch, loss=loss, mean=config, kl_coef=0.0, kl_estimator="k3", kl_unbiased=False)


@pytest.mark.parametrize(
    ("mean", "total", "count"),
    # The good episode's branches have 3, 4 and 5 tokens, the bad one 6; each token has the loss 1, or 2 in the bad one.
    [("token", 4 + 12, 4 + 6), ("sequence", 1 + 2, 2), ("sum", 4 + 12, 2)],
)
def test_an_episode_has_the_weight_of_one_in_the_loss(mean, total, count):
    batch = forked()
    batch["advantages"] = torch.tensor([1.0, 1.0, 1.0, 2.0])
    batch["response_mask"] = Ragged.from_list([torch.ones(size, dtype=torch.int64) for size in (3, 4, 5, 6)])
    batch["row_weight"] = row_weights(batch)
    log_probs = torch.full((4, 6), -1.0, requires_grad=True)
    out = Outputs({"log_probs": log_probs, "entropy": torch.zeros(4, 6)})
    item = UpdateItem(batch, [4], a_loss, mean, constants={"scale": 1.0})
    term = call_loss(item, out, batch, torch.device("cpu"))["policy"]
    assert (float(term.total.detach()), float(term.count)) == pytest.approx((total, count))
    term.total.backward()
    gradient = log_probs.grad.sum(1).tolist()
    assert sum(gradient[:3]) == pytest.approx(-1.0 if mean == "sequence" else -4.0)


def test_a_branch_that_stands_for_its_episode_has_weight_one():
    assert row_weights(forked()).tolist() == pytest.approx([1 / 3] * 3 + [1])
    assert row_weights(forked()[[0, 3, 0, 3]]) is None, "the same row in two pairs"
    assert row_weights(forked()[[1, 3]]) is None


@pytest.mark.parametrize(("keep_together", "weighs"), [(None, True), ("uid", True), ("branch", False)])
def test_an_update_weighs_branches_but_not_the_rows_of_pairs(keep_together, weighs):
    ((item,),) = plan_update(
        [(forked(), a_loss, 1.0)],
        1,
        mini_batches=1,
        keep_together=keep_together,
        costs=lambda _: None,
        config=None,
        importance=None,
        numerics=Numerics(),
        constants={"tau": 0.5},
    )
    assert item.constants == {"tau": 0.5}
    assert ("row_weight" in item.batch) == weighs
    if weighs:
        assert sorted(item.batch["row_weight"].tolist()) == pytest.approx([1 / 3] * 3 + [1])


def test_moments_count_an_episode_by_its_first_branch():
    """Tokens 1, 1 and 9, 9 of two branches, and 3, 3 of another episode: the mean is 13/3 by rows, 2 by episodes."""
    batch = DataProto.from_dict(
        {
            "x": Ragged.from_list([[1.0, 1.0], [9.0, 9.0], [3.0, 3.0]]),
            "mask": Ragged.from_list([[1, 1]] * 3),
            "branch": torch.tensor([0, 1, 0]),
        },
        {"episode": ["a", "a", "b"]},
    )
    assert batch.masked_moments("x", "mask").mean == pytest.approx(13 / 3)
    found = batch.masked_moments("x", "mask", per_episode=True)
    assert (found.count, found.mean, found.var) == (4, 2.0, 1.0)
