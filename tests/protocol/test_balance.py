"""Rows dealt out by what they cost: by hand, against the best that is possible, and back in order."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.protocol import DataProto
from rlcore.protocol.balance import split_batch_by_cost, split_by_cost
from rlcore.protocol.row_groups import row_groups, split_evenly


def largest(cut, costs):
    return max(sum(costs[row] for unit in part for row in unit) for part in cut)


def test_by_hand():
    """Dealt 9, 8, 5, 4, 2, 2 to the part with the least: 9 | 8; 5 to 8, 4 to 9; 2 each. Evenly cut: 22 and 8."""
    costs = [9, 5, 8, 2, 4, 2]
    assert largest(split_evenly(row_groups(6, None), 2), costs) == 22
    assert split_by_cost(row_groups(6, None), costs, 2) == [[[0], [3], [4]], [[1], [2], [5]]]
    assert largest(split_by_cost(row_groups(6, None), costs, 2), costs) == 15


def test_one_long_row_is_worth_many_short_ones():
    """Evenly cut, the first rank would have 102 of 106."""
    cut = split_by_cost(row_groups(6, None), [100, 1, 1, 1, 1, 2], 2)
    assert cut == [[[0]], [[1], [2], [3], [4], [5]]]


def test_rows_stay_where_dealing_them_out_gains_nothing():
    for costs in ([5, 5, 5, 5], [3, 2, 2, 3], [0, 0, 0, 0]):
        assert split_by_cost(row_groups(4, None), costs, 2) == [[[0], [1]], [[2], [3]]]
    assert split_by_cost(row_groups(3, None), [7, 1, 1], 1) == [[[0], [1], [2]]]
    assert split_by_cost([], [], 2) == [[], []]


def test_units_are_never_parted():
    """Units cost 10, 1, 9, 2; dealt: 10 + 1 and 9 + 2."""
    units = row_groups(8, list("aabbccdd"))
    assert split_by_cost(units, [5, 5, 0, 1, 4, 5, 1, 1], 2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert split_by_cost(units, [5, 5, 4, 5, 0, 1, 1, 1], 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@given(costs=st.lists(st.integers(0, 50), max_size=7), parts=st.integers(1, 3))
def test_the_largest_part_is_within_grahams_bound_of_the_best(costs, parts):
    cut = split_by_cost(row_groups(len(costs), None), costs, parts)
    assert sorted(row for part in cut for unit in part for row in unit) == list(range(len(costs)))
    dealt = itertools.product(range(parts), repeat=len(costs))
    best = min(
        max(sum(c for c, p in zip(costs, to, strict=True) if p == part) for part in range(parts)) for to in dealt
    )
    assert 3 * parts * largest(cut, costs) <= (4 * parts - 1) * best


@given(
    units=st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=4), max_size=40),
    parts=st.integers(1, 8),
)
def test_the_largest_part_is_at_most_an_even_share_and_one_unit_and_never_worse_than_an_even_cut(units, parts):
    costs = [cost for unit in units for cost in unit]
    ids = row_groups(len(costs), [number for number, unit in enumerate(units) for _ in unit])
    cut = split_by_cost(ids, costs, parts)
    assert sorted(map(tuple, (unit for part in cut for unit in part))) == sorted(map(tuple, ids))
    assert parts * largest(cut, costs) <= sum(costs) + (parts - 1) * max(map(sum, units), default=0)
    assert largest(cut, costs) <= largest(split_evenly(ids, parts), costs)
    assert all(part == sorted(part) for part in cut)
    assert cut == split_by_cost(ids, costs, parts)


@given(costs=st.lists(st.integers(0, 9), max_size=12), parts=st.integers(1, 4))
def test_joined_rows_come_back_in_order(costs, parts):
    batch = DataProto.from_single_dict({"row": torch.arange(len(costs))})
    cut, back = split_batch_by_cost(batch, costs, parts)
    assert len(cut.parts) == parts
    assert DataProto.concat(list(cut.parts))[back]["row"].tolist() == list(range(len(costs)))
