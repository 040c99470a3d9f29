"""Cuts rows into mini-batches, ranks and micro-batches; never splits rows that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rlcore.protocol import DataProto
from rlcore.protocol.balance import split_by_cost
from rlcore.protocol.row_groups import row_groups, split_evenly


def column_values(batch: DataProto, name: str | None) -> list[object] | None:
    """Return a column's values by row, which define the units; None without a column."""
    return None if name is None else list(batch.view(name).tolist())


def largest_unit(batch: DataProto, keep_together: str | None) -> int:
    """Return the most tokens of rows that stay in one micro-batch because of the column `keep_together`; 0 without it.

    A prompt that the engine computes once for all of them counts for each.
    """
    if keep_together is None:
        return 0
    lengths = batch.view("prompts").lengths + batch.view("responses").lengths
    units = row_groups(len(batch), column_values(batch, keep_together))
    return max((int(lengths[unit].sum()) for unit in units), default=0)


def update_plan(
    rows: int,
    together: Sequence[object] | np.ndarray | None,
    mini_batches: int,
    ranks: int,
    costs: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Return the row indices for each rank and mini-batch, `plan[rank][mini_batch]`.

    Mini-batches are consecutive runs of rows, equal for any number of ranks. With fewer units than mini-batches some
    are empty; an update skips and counts those. The units of each are spread over the ranks by the rows' `costs`;
    without costs, by their number of rows.
    """
    units = row_groups(rows, together)
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for mini_batch in split_evenly(units, mini_batches):
        runs = split_evenly(mini_batch, ranks) if costs is None else split_by_cost(mini_batch, costs, ranks)
        for rank, run in enumerate(runs):
            plan[rank].append(list(chain.from_iterable(run)))
    return plan


def micro_batches(
    lengths: Sequence[int],
    together: Sequence[object] | np.ndarray | None,
    max_rows: int,
    max_tokens: int,
    at_least: int = 1,
) -> list[list[int]]:
    """Cut rows of the given token `lengths` into micro-batches of at most `max_rows` and `max_tokens` (0: no limit).

    Units are sorted by length, longest first, so that a micro-batch holds rows of similar length. A unit above a limit
    is a micro-batch of its own. If this gives fewer than `at_least` (a pipeline has stages to keep busy), the limit
    becomes an equal share of the tokens.
    """
    units = row_groups(len(lengths), together)
    units.sort(key=lambda unit: -max(lengths[row] for row in unit))
    batches: list[list[int]] = []
    tokens = 0
    for unit in units:
        size = sum(lengths[row] for row in unit)
        full = batches and (
            (max_rows and len(batches[-1]) + len(unit) > max_rows) or (max_tokens and tokens + size > max_tokens)
        )
        if full or not batches:
            batches.append([])
            tokens = 0
        batches[-1].extend(unit)
        tokens += size
    # The second condition ends the recursion: the rows may be too few or too uneven for `at_least` micro-batches.
    if len(batches) < at_least and max_tokens != (share := max(1, sum(lengths) // at_least)):
        return micro_batches(lengths, together, max_rows, share, at_least)
    return batches
