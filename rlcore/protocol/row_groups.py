"""Rows that belong together, and cuts that never part them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def row_groups(rows: int, together: Sequence[object] | np.ndarray | None) -> list[list[int]]:
    """Return the row indices of each unit that must not be cut: rows with equal values of `together`, or single rows.

    Units come in order of their first row.
    """
    if together is None:
        return [[row] for row in range(rows)]
    units: dict[object, list[int]] = {}
    for row, value in enumerate(together):
        units.setdefault(value, []).append(row)
    return list(units.values())


def split_evenly(units: list[list[int]], parts: int) -> list[list[list[int]]]:
    """Cut `units` into `parts` consecutive runs whose numbers of rows are as equal as whole units allow.

    A run may be empty when there are fewer units than parts.
    """
    ends = np.cumsum([len(unit) for unit in units])
    total = int(ends[-1]) if len(ends) else 0
    # A unit goes to the run in which its middle lies.
    middles = [end - len(unit) / 2 for end, unit in zip(ends, units, strict=True)]
    runs: list[list[list[int]]] = [[] for _ in range(parts)]
    for unit, middle in zip(units, middles, strict=True):
        runs[min(int(middle * parts / total), parts - 1)].append(unit)
    return runs
