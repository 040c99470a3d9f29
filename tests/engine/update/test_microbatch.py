"""Cutting rows: whole groups, equal sizes, the same mini-batches for every number of ranks."""

from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.update.microbatch import micro_batches, update_plan
from rlcore.protocol.row_groups import row_groups, split_evenly


def test_units_are_rows_with_equal_values_in_order():
    assert row_groups(3, None) == [[0], [1], [2]]
    assert row_groups(5, ["a", "b", "a", "c", "b"]) == [[0, 2], [1, 4], [3]]


def test_plan_by_hand():
    # 8 rows in 4 pairs, 2 mini-batches, 2 ranks: each rank gets one pair of each mini-batch.
    assert update_plan(8, list("aabbccdd"), 2, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    # 3 rows over 2 ranks, and 1 row over 2 ranks.
    assert update_plan(3, None, 1, 2) == [[[0]], [[1, 2]]]
    assert update_plan(1, None, 1, 2) in ([[[0]], [[]]], [[[]], [[0]]])
    assert update_plan(0, None, 1, 2) == [[[]], [[]]]


def test_costs_move_whole_units_between_ranks_and_not_between_mini_batches():
    """Pairs cost 9, 8, 7, 1 and 1, 1, 6, 1. Each mini-batch of 4 pairs is dealt: 9 + 1 and 8 + 7; 6 and 1 + 1 + 1."""
    costs = [4, 5, 4, 4, 3, 4, 0, 1, 1, 0, 0, 1, 3, 3, 1, 0]
    plan = update_plan(16, [row // 2 for row in range(16)], 2, 2, costs)
    assert plan == [[[0, 1, 6, 7], [12, 13]], [[2, 3, 4, 5], [8, 9, 10, 11, 14, 15]]]
    assert update_plan(16, [row // 2 for row in range(16)], 2, 1, costs) == update_plan(16, None, 2, 1)


def test_more_mini_batches_than_groups_leave_some_empty():
    assert update_plan(4, list("aabb"), 3, 1) == [[[0, 1], [], [2, 3]]]


@given(groups=st.lists(st.integers(1, 4), max_size=12), mini_batches=st.integers(1, 3), ranks=st.integers(1, 5))
def test_every_row_is_used_once_groups_are_whole_and_mini_batches_do_not_depend_on_ranks(groups, mini_batches, ranks):
    together = [group for group, size in enumerate(groups) for _ in range(size)]
    plan = update_plan(len(together), together, mini_batches, ranks)
    alone = update_plan(len(together), together, mini_batches, 1)
    for index in range(mini_batches):
        assert sorted(row for rank in plan for row in rank[index]) == sorted(alone[0][index])
    assert sorted(row for rank in plan for cut in rank for row in cut) == list(range(len(together)))
    for group in set(together):
        homes = {
            (r, m) for r, rank in enumerate(plan) for m, cut in enumerate(rank) for row in cut if together[row] == group
        }
        assert len(homes) == 1


@given(rows=st.integers(0, 30), parts=st.integers(1, 6))
def test_single_rows_are_split_evenly(rows, parts):
    sizes = [sum(len(unit) for unit in run) for run in split_evenly(row_groups(rows, None), parts)]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


@given(lengths=st.lists(st.integers(1, 20), max_size=20), max_rows=st.integers(0, 5), max_tokens=st.integers(0, 40))
def test_micro_batches_respect_both_limits(lengths, max_rows, max_tokens):
    cuts = micro_batches(lengths, None, max_rows, max_tokens)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or not max_rows or len(cut) <= max_rows
        assert len(cut) == 1 or not max_tokens or sum(lengths[row] for row in cut) <= max_tokens


def test_a_group_larger_than_the_limit_stays_whole():
    assert micro_batches([3, 3, 9], ["a", "a", "b"], 1, 4) == [[2], [0, 1]]
