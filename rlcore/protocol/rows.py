"""Row selections: slices, lists and masks, turned into one checked form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError

Index: TypeAlias = slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Several rows: a slice, a list of row numbers (negative ones count from the end), or a mask of one bool per row."""

Rows: TypeAlias = slice | Tensor
"""A checked selection: `slice(start, stop)` with step 1 inside the batch, or CPU int64 row numbers [n], all >= 0."""

_ALLOWED = "rows are selected by integers or bools"


def select_rows(index: Index, rows: int) -> Rows:
    """Return `index` over `rows` rows as a checked selection; DataError for a wrong type or a missing row."""
    if isinstance(index, slice):
        start, stop, step = index.indices(rows)
        if step == 1:
            return slice(start, max(start, stop))
        return torch.tensor(range(start, stop, step), dtype=torch.int64)
    numbers = _as_tensor(index)
    if numbers.dim() != 1:
        raise DataError(f"a row selection must be one-dimensional, got an array of shape {tuple(numbers.shape)}")
    if numbers.dtype == torch.bool:
        if len(numbers) != rows:
            raise DataError(f"the mask has {len(numbers)} entries for {rows} rows; it needs one per row")
        return numbers.nonzero().flatten()
    if numbers.is_floating_point() or numbers.is_complex():
        raise DataError(f"{_ALLOWED}, got {numbers.dtype}")
    # Unsigned and smaller integers too: one type from here on.
    numbers = numbers.to(torch.int64)
    outside = numbers[(numbers < -rows) | (numbers >= rows)]
    if len(outside):
        raise DataError(f"row {int(outside[0])} is outside the batch of {rows} rows")
    return torch.where(numbers < 0, numbers + rows, numbers)


def select_row(index: int, rows: int) -> int:
    """Return the row number `index` as one >= 0; a negative one counts from the end. DataError if it does not exist."""
    if not -rows <= index < rows:
        raise DataError(f"row {index} is outside the batch of {rows} rows")
    return index % rows


def _as_tensor(index: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> Tensor:
    if isinstance(index, Tensor):
        return index.detach().cpu()
    if isinstance(index, np.ndarray):
        if index.dtype.kind not in "biuf":
            raise DataError(f"{_ALLOWED}, got an array of {index.dtype}")
        # A copy, as torch warns of read-only arrays.
        return torch.from_numpy(np.array(index))
    if not isinstance(index, Sequence) or isinstance(index, str):
        raise DataError(f"rows are selected by a slice, a list, a mask or an array, got {type(index).__name__}")
    return _list_as_tensor(index)


def _list_as_tensor(index: Sequence[Any]) -> Tensor:
    """Return a list of integers as int64, a list of bools as bool; DataError for a mix or another type."""
    kinds = {type(item) for item in index}
    if not kinds:
        return torch.empty(0, dtype=torch.int64)
    if kinds <= {bool, np.bool_}:
        return torch.tensor([bool(item) for item in index])
    # bool is a subclass of int.
    if bool not in kinds and all(issubclass(kind, (int, np.integer)) for kind in kinds):
        return torch.tensor([int(item) for item in index])
    names = ", ".join(sorted({"bool" if kind is np.bool_ else kind.__name__ for kind in kinds}))
    raise DataError(f"a list of rows must hold only integers or only bools, got {names}")
