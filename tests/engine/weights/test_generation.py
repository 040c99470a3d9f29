"""Which rank holds what when it generates: the paper's figure 8, and what holds for every layout."""

import itertools

import pytest

from rlcore.engine.parallel.layout import Layout
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.errors import ConfigError


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def every_layout():
    """All generation layouts of all training layouts of up to 16 ranks."""
    for pp, tp, dp in itertools.product(range(1, 17), repeat=3):
        if pp * tp * dp <= 16:
            for stages, shards in itertools.product(divisors(pp), divisors(tp)):
                yield GenerationLayout(Layout(pp, tp, dp), stages, shards)


def from_one(groups):
    return [[rank + 1 for rank in group] for group in groups]


def test_figure_8():
    """Training 1-4-2 to generation 1-2-2-2, with the figure's GPU numbers."""
    ours = GenerationLayout(Layout(pp=1, tp=4, dp=2), pp=1, tp=2)
    assert ours.micro_dp == 2
    assert ours.replicas == 4
    assert from_one(ours.groups("tp")) == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert from_one(ours.groups("micro_dp")) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_stages_are_grouped_at_intervals_too():
    """Training 4-2-1 to generation 2-1: by hand, rank = 2 * stage + shard."""
    layout = GenerationLayout(Layout(pp=4, tp=2, dp=1), pp=2, tp=1)
    assert layout.groups("micro_dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [list(layout.stages(rank)) for rank in (0, 3, 4)] == [[0, 1], [0, 1], [2, 3]]
    assert layout.engine_order == [0, 4, 1, 5, 2, 6, 3, 7]


def test_an_engine_with_consecutive_groups_gets_another_numbering():
    layout = GenerationLayout(Layout(pp=1, tp=4, dp=2), pp=1, tp=2)
    assert layout.engine_order == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_layout_up_to_16_ranks():
    count = 0
    for layout in every_layout():
        world = layout.training.world_size
        count += 1
        for axis, size in (("tp", layout.tp), ("pp", layout.pp), ("micro_dp", layout.micro_dp)):
            groups = layout.groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            assert {len(group) for group in groups} == {size}
        assert all(layout.reuses(rank) for rank in range(world))
        # The training shards of a micro-DP group are, each once, the generating shard that its ranks share.
        for group in layout.groups("micro_dp"):
            places = sorted((at.pp, at.tp) for at in map(layout.training.coordinates, group))
            for rank in group:
                assert places == sorted(itertools.product(layout.stages(rank), layout.tensor_shards(rank)))
        # Consecutive ranks of the engine are the tensor groups; each replica is a run of stages.
        order = layout.engine_order
        runs = [order[start : start + layout.tp] for start in range(0, world, layout.tp)]
        assert sorted(runs) == layout.groups("tp")
    assert count > 200


@pytest.mark.parametrize(
    ("training", "asked", "message"),
    [
        (Layout(1, 6, 1), {"tp": 4}, "rollout.tp=4 does not divide engine.tp=6.*rollout.tp can be 1, 2, 3, 6"),
        (Layout(1, 1, 2), {"tp": 2}, "rollout.tp=2 does not divide engine.tp=1.*can be 1;.*engine.tp to a multiple"),
        (Layout(4, 1, 2), {"pp": 3}, "rollout.pp=3 does not divide engine.pp=4.*rollout.pp can be 1, 2, 4"),
        (Layout(4, 1, 2), {"pp": 0}, "rollout.pp=0 does not divide"),
    ],
)
def test_a_layout_that_training_cannot_give_is_refused(training, asked, message):
    with pytest.raises(ConfigError, match=message):
        GenerationLayout(training, **asked)
