"""Row selections: every way to name rows of a batch, turned into one checked form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError

Index: TypeAlias = slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Several rows: a slice, a list of row numbers (negative from the end), or a mask of one bool a row."""

Rows: TypeAlias = slice | Tensor
"""A checked selection: `slice(start, stop)` with step 1 inside the batch, or CPU int64 row numbers [n], all >= 0."""


def select_rows(index: Index, rows: int) -> Rows:
    """Return `index` over `rows` rows as a checked selection; DataError when it is no selection of such rows."""
    if isinstance(index, slice):
        start, stop, step = index.indices(rows)
        if step == 1:
            return slice(start, max(start, stop))
        return torch.tensor(range(start, stop, step), dtype=torch.int64)
    numbers = _as_tensor(index)
    if numbers.dim() != 1:
        raise DataError(f"rows are selected by one number or bool each, got an array of shape {tuple(numbers.shape)}")
    if numbers.dtype == torch.bool:
        if len(numbers) != rows:
            raise DataError(f"the mask has {len(numbers)} entries for {rows} rows; it needs one a row")
        return numbers.nonzero().flatten()
    if numbers.is_floating_point() or numbers.is_complex():
        raise DataError(f"rows are selected by integers or bools, got {numbers.dtype}")
    numbers = numbers.to(torch.int64)
    outside = numbers[(numbers < -rows) | (numbers >= rows)]
    if len(outside):
        raise DataError(f"row {int(outside[0])} is outside the batch of {rows} rows")
    return torch.where(numbers < 0, numbers + rows, numbers)


def select_row(index: int, rows: int) -> int:
    """Return the row number `index` (negative from the end) as one >= 0; DataError when there is no such row."""
    if not -rows <= index < rows:
        raise DataError(f"row {index} is outside the batch of {rows} rows")
    return index % rows


def _as_tensor(index: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> Tensor:
    if isinstance(index, Tensor):
        return index.detach().cpu()
    if isinstance(index, np.ndarray):
        if index.dtype.kind not in "biuf":
            raise DataError(f"rows are selected by integers or bools, got an array of {index.dtype}")
        return torch.from_numpy(np.array(index))
    if not isinstance(index, Sequence) or isinstance(index, str):
        raise DataError(f"rows are selected by a slice, a list, a mask or an array, got {type(index).__name__}")
    if not len(index):
        return torch.empty(0, dtype=torch.int64)
    kinds = {bool if isinstance(item, (bool, np.bool_)) else type(item) for item in index}
    if kinds != {bool} and not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"a list of rows holds integers alone or bools alone, got {names}")
    return torch.tensor([bool(item) for item in index] if kinds == {bool} else [int(item) for item in index])
