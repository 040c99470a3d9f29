"""Splitting a batch by the cost of its rows, so that no rank waits for another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.protocol.dataproto import DataProto
from rlcore.protocol.row_groups import row_groups, rows_of, split_evenly


@dataclass(frozen=True)
class SplitBatch:
    """A batch that the caller has split: dispatch modes that split rows send one of `parts` to each place, in order."""

    parts: tuple[DataProto, ...]


def split_by_cost(groups: list[list[int]], costs: Sequence[int], parts: int) -> list[list[list[int]]]:
    """Return `groups` of rows dealt into `parts` so that the largest total cost of a part is small.

    `costs` has one entry per row. Groups are dealt in order of falling cost, each to the part with the lowest total,
    the first of equals. The largest total is at most 4/3 - 1/(3 parts) times the minimum (Graham 1969), and at most an
    even share plus one group. Groups keep their order within a part. If the largest total of `split_evenly` is no
    higher, returns that split instead.
    """
    weights = [_cost(group, costs) for group in groups]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    # The heap's first entry is the part with the lowest load; equal loads compare by part number.
    for number in sorted(range(len(groups)), key=lambda number: -weights[number]):
        load, part = loads[0]
        dealt[part].append(number)
        heapq.heapreplace(loads, (load + weights[number], part))
    balanced = []
    for numbers in dealt:
        balanced.append([groups[number] for number in sorted(numbers)])

    def largest(split: list[list[list[int]]]) -> int:
        return max(_cost(rows_of(part), costs) for part in split)

    # On a tie the even split wins, which keeps rows in consecutive runs.
    return min(split_evenly(groups, parts), balanced, key=largest)


def split_batch_by_cost(batch: DataProto, costs: Sequence[int], parts: int) -> tuple[SplitBatch, Tensor]:
    """Return the batch split into parts of similar cost, and the order int64 [rows] that restores the joined rows."""
    dealt = split_by_cost(row_groups(len(batch), None), costs, parts)
    rows = [rows_of(part) for part in dealt]
    return SplitBatch(tuple(batch[part] for part in rows)), torch.tensor(rows_of(rows), dtype=torch.int64).argsort()


def split_batch_by_group(batch: DataProto, together: Sequence[object], parts: int) -> tuple[SplitBatch, Tensor]:
    """Return the batch split into parts of whole groups, and the order int64 [rows] that restores the joined rows.

    Rows with equal values of `together` [rows] are a group.
    """
    rows = [rows_of(run) for run in split_evenly(row_groups(len(batch), together), parts)]
    return SplitBatch(tuple(batch[part] for part in rows)), torch.tensor(rows_of(rows), dtype=torch.int64).argsort()


def _cost(rows: Sequence[int], costs: Sequence[int]) -> int:
    return sum(costs[row] for row in rows)
