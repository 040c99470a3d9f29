"""Groups of rows that belong together, and splits that never separate them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def row_groups(rows: int, together: Sequence[object] | np.ndarray | None) -> list[list[int]]:
    """Return the row numbers of each group: rows with equal values of `together`, or single rows if it is None.

    Groups are in the order of their first rows.
    """
    if together is None:
        return [[row] for row in range(rows)]
    groups: dict[object, list[int]] = {}
    for row, value in enumerate(together):
        groups.setdefault(value, []).append(row)
    return list(groups.values())


def split_evenly(groups: list[list[int]], parts: int) -> list[list[list[int]]]:
    """Split `groups` into `parts` consecutive runs with row counts as equal as whole groups allow.

    With fewer groups than parts some runs are empty.
    """
    ends = np.cumsum([len(group) for group in groups])
    total = int(ends[-1]) if len(ends) else 0
    # A group goes to the run that contains its middle.
    middles = [end - len(group) / 2 for end, group in zip(ends, groups, strict=True)]
    runs: list[list[list[int]]] = [[] for _ in range(parts)]
    for group, middle in zip(groups, middles, strict=True):
        runs[min(int(middle * parts / total), parts - 1)].append(group)
    return runs


def rows_of(groups: list[list[int]]) -> list[int]:
    """Return the row numbers of all groups, in order."""
    return [row for group in groups for row in group]
