"""Count, mean and variance of a column's entries under a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.columns import Value
from rlcore.protocol.ragged import Ragged

if TYPE_CHECKING:
    from rlcore.protocol.dataproto import DataProto


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance (divided by the count), computed in float64. Mean and variance are nan if count is 0."""

    count: int
    mean: float
    var: float


def part_moments(batch: DataProto, column: str, mask: str) -> Moments:
    """Return the moments of a tensor column's entries where the column `mask` is not zero, in one part of a batch.

    Raises DataError unless both columns have the same shape.
    """
    values, kept = batch.view(column), batch.view(mask)
    if _row_shapes(values) != _row_shapes(kept):
        raise DataError(f"mask {mask!r} and column {column!r} must have the same shape, and ragged rows equal lengths")
    # In float64 the moments of other splits of the rows differ in the last bits only.
    entries = _flat(values)[_flat(kept).to(_flat(values).device) != 0].double()
    if not len(entries):
        return Moments(0, nan, nan)
    return Moments(len(entries), float(entries.mean()), float(entries.var(correction=0)))


def combine_moments(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all parts' entries together."""
    # Parts without entries have NaN moments.
    filled = [part for part in parts if part.count]
    if len(filled) < 2:
        return filled[0] if filled else Moments(0, nan, nan)
    count = sum(part.count for part in filled)
    mean = sum(part.count * part.mean for part in filled) / count
    var = sum(part.count * (part.var + (part.mean - mean) ** 2) for part in filled) / count
    return Moments(count, mean, var)


def _row_shapes(value: Value) -> list[int]:
    """Return the shape of a dense column, or the entry shape and row offsets of a ragged one."""
    if isinstance(value, Ragged):
        return [-1, *value.values.shape[1:], *value.offsets.tolist()]
    return list(value.shape)


def _flat(value: Value) -> Tensor:
    tensor = value.values if isinstance(value, Ragged) else value
    assert isinstance(tensor, Tensor)
    return tensor.flatten()
