"""Rows cut by what they cost, so that no rank waits for another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.protocol.dataproto import DataProto
from rlcore.protocol.row_groups import row_groups, split_evenly


@dataclass(frozen=True)
class SplitBatch:
    """A batch that is cut already: the modes that cut rows give each of their places one of `parts`, in order."""

    parts: tuple[DataProto, ...]


def split_by_cost(units: list[list[int]], costs: Sequence[int], parts: int) -> list[list[list[int]]]:
    """Deal `units` of rows out into `parts` so that the largest total of the rows' `costs` is small.

    Units are dealt the costliest first, each to the part with the least so far, the first of equals: the largest part
    costs at most 4/3 - 1/(3 parts) times the least possible (Graham 1969), and at most an even share plus one unit.
    Within a part units keep their order. Where that is no better than `split_evenly`, rows stay as that cuts them.
    """
    weights = [sum(costs[row] for row in unit) for unit in units]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for number in sorted(range(len(units)), key=lambda number: -weights[number]):
        load, part = loads[0]
        dealt[part].append(number)
        heapq.heapreplace(loads, (load + weights[number], part))
    balanced = [[units[number] for number in sorted(part)] for part in dealt]

    def slowest(cut: list[list[list[int]]]) -> int:
        return max(sum(costs[row] for unit in part for row in unit) for part in cut)

    return min(split_evenly(units, parts), balanced, key=slowest)


def split_batch_by_cost(batch: DataProto, costs: Sequence[int], parts: int) -> tuple[SplitBatch, Tensor]:
    """Return the batch cut into parts of like cost, and the int64 [rows] that bring the joined rows back into order."""
    dealt = split_by_cost(row_groups(len(batch), None), costs, parts)
    rows = [[row for unit in part for row in unit] for part in dealt]
    order = torch.tensor([row for part in rows for row in part], dtype=torch.int64)
    return SplitBatch(tuple(batch[part] for part in rows)), order.argsort()
