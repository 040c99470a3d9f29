"""Sampling on a pool of its own: in turn the same numbers as on one pool, and ahead of training by one step."""

import itertools

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SMALL = [
    "data.batch_size=4",
    "rollout.response_len=6",
    "data.max_rows=128",
    "data.eval_size=4",
    "trainer.samples_per_step=64",
]
AHEAD = [*SMALL, "trainer.rollouts_ahead=1", "engine.lr=1e-3"]
GRPO = ["algo=grpo", "algo.mini_batches=2", "cluster.pools={main: [actor, ref], gen: [rollout]}"]
HERE = "cluster=in_process"


def numbers(run):
    """The metrics without who was busy when."""
    return [{name: value for name, value in row.items() if "timeline" not in name} for row in run.numbers]


def test_in_turn_a_pool_of_its_own_changes_no_bit(train_here, tmp_path):
    """Of samples, evaluations and metrics; samples of the present weights still serve as old_log_probs."""
    settings = [*SMALL, "algo=grpo", "engine.lr=1e-3", "trainer.total_steps=2", "trainer.eval_every=2", HERE]
    one = train_here(tmp_path / "one", *settings)
    two = train_here(tmp_path / "two", *settings, "cluster.pools={main: [actor, ref], gen: [rollout]}")
    assert one.samples == two.samples
    assert numbers(one) == numbers(two)
    assert numbers(two)[2]["train/grad_norm"] > 0
    assert not [name for name in numbers(two)[2] if "importance" in name or "staleness" in name]


@pytest.mark.parametrize(
    "settings",
    [
        GRPO,
        ["algo=ppo", "algo.epochs=2", "cluster.pools={main: [actor, ref], side: [critic], gen: [rollout]}"],
        ["algo=online_dpo", "cluster.pools={main: [actor], side: [ref], gen: [rollout]}"],
    ],
)
def test_each_step_samples_with_the_weights_of_two_steps_before(train_here, tmp_path, settings):
    """Those of the beginning in steps 1 and 2; after the evaluation of step 2 its own in steps 3 and 4."""
    run = train_here(tmp_path / "run", *AHEAD, *settings, HERE, "trainer.total_steps=4", "trainer.eval_every=2")
    steps = numbers(run)[1:]
    version = [0, *itertools.accumulate(int(row["train/optimizer_steps"]) for row in steps)]
    assert version[1] > 0
    behind = [0, version[1], 0, version[3] - version[2]]
    trained = [(row, age) for row, age in zip(steps, behind, strict=True) if row["train/optimizer_steps"]]
    for row, age in trained:
        assert row["rollout/staleness"] == row["rollout/staleness_max"] == age
        weight = row["train/importance_weight"]
        # The engines' log-probs of the same weights differ by rounding; of older ones the truncated ratio falls.
        assert abs(weight - 1.0) < 1e-6 if age == 0 else weight < 0.99
    assert {True, False} == {age > 0 for _, age in trained}


LONGER = [*AHEAD, *GRPO, "trainer.total_steps=5", "trainer.eval_every=0", "trainer.checkpoint_every=2"]


@pytest.fixture(scope="module")
def straight(train_here, tmp_path_factory):
    """A run in this process, not interrupted."""
    return train_here(tmp_path_factory.mktemp("straight") / "run", *LONGER, HERE)


def test_ahead_and_resumed_are_the_same_to_the_last_bit(straight, train_here, stopping_after, tmp_path):
    """Stopped after step 3, with the checkpoint of step 2."""
    with pytest.raises(RuntimeError, match="stop here"):
        train_here(tmp_path / "resumed", *LONGER, HERE, plugins=stopping_after(2))
    resumed = train_here(tmp_path / "resumed", *LONGER, HERE)
    assert numbers(resumed) == numbers(straight)
    assert resumed.samples == straight.samples
    assert [row["rollout/staleness"] for row in numbers(straight)] == [0, 2, 0, 2, 0]


def test_on_ray_it_is_the_same_run(straight, ray_cluster, train_here, tmp_path):
    on_ray = train_here(tmp_path / "run", *LONGER, "cluster.workers=1")
    assert on_ray.samples == straight.samples
    for one, other in zip(numbers(straight), numbers(on_ray), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_on_ray_resumed_it_is_the_same_to_the_last_bit(ray_cluster, train_here, stopping_after, tmp_path):
    straight = train_here(tmp_path / "straight", *LONGER, "cluster.workers=1")
    with pytest.raises(RuntimeError, match="stop here"):
        train_here(tmp_path / "resumed", *LONGER, "cluster.workers=1", plugins=stopping_after(2))
    resumed = train_here(tmp_path / "resumed", *LONGER, "cluster.workers=1")
    assert numbers(resumed) == numbers(straight)
    assert resumed.samples == straight.samples
