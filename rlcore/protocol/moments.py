"""Count, mean and variance of the entries that a mask keeps."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.columns import Value
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.table import Table


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance (divided by count) of some entries, summed in float64; both nan when count is 0."""

    count: int
    mean: float
    var: float


def masked_moments(table: Table, column: str, mask: str) -> Moments:
    """Return the moments of a tensor column's entries where the column `mask` is not zero; see DataProto."""
    values, kept = table.column(column, ("dense", "ragged")).view(), table.column(mask, ("dense", "ragged")).view()
    if _layout(values) != _layout(kept):
        raise DataError(f"the mask {mask!r} has not the shape of column {column!r}; it needs one entry for each of its")
    entries = _flat(values)[_flat(kept).to(_flat(values).device) != 0].double()
    if not len(entries):
        return Moments(0, nan, nan)
    return Moments(len(entries), float(entries.mean()), float(entries.var(correction=0)))


def _layout(value: Value) -> list[int]:
    """Return what two columns share exactly when their entries correspond."""
    if isinstance(value, Ragged):
        return [-1, *value.values.shape[1:], *value.offsets.tolist()]
    return list(value.shape)


def _flat(value: Value) -> Tensor:
    tensor = value.values if isinstance(value, Ragged) else value
    assert isinstance(tensor, Tensor)
    return tensor.flatten()
