"""Rows of different lengths, stored back to back without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.buffers import from_array, to_array
from rlcore.protocol.rows import Index, Rows, select_row, select_rows

Side = Literal["left", "right"]


class Ragged:
    """Rows of different lengths: `values` [total, ...] back to back, `offsets` int64 [rows + 1] from 0 to total.

    Row i is `values[offsets[i]:offsets[i + 1]]`. The values may be on any device; the offsets are on the CPU, where
    rows are selected. Raises DataError when the offsets do not fit the values.
    """

    # Offsets are numpy arrays: on a few rows, numpy is many times as fast as torch.
    __slots__ = ("_ends", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        if values.dim() == 0:
            raise DataError("the values of a ragged column need at least one dimension, got a scalar")
        if offsets.dim() != 1 or offsets.dtype != torch.int64 or len(offsets) == 0:
            raise DataError(f"offsets must be int64 [rows + 1], got {offsets.dtype} {list(offsets.shape)}")
        ends = offsets.cpu().numpy()
        if ends[0] != 0 or ends[-1] != len(values) or bool((ends[1:] < ends[:-1]).any()):
            raise DataError(
                f"offsets must rise from 0 to {len(values)}, the number of values, got {ends.tolist()[:8]} ..."
            )
        self.values = values
        self._ends = ends

    @classmethod
    def _trusted(cls, values: Tensor, ends: np.ndarray) -> Ragged:
        """Return a Ragged without checking the offsets; the checks take as long as all else on a small column."""
        ragged = cls.__new__(cls)
        ragged.values, ragged._ends = values, ends
        return ragged

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        """Return `values` [total, ...] split into rows of `lengths`, int64 [rows]; DataError if they do not add up."""
        return cls(values, torch.from_numpy(_ends(lengths.cpu().numpy())))

    @classmethod
    def from_list(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Return a Ragged of a list of tensors [length, ...] or lists of numbers; an empty list needs `dtype`.

        Raises DataError for rows of different dtypes or trailing shapes.
        """
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        if not tensors:
            if dtype is None:
                raise DataError("an empty list of rows has no dtype; pass dtype=")
            return cls(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
        kinds = {(row.dtype, row.shape[1:]) for row in tensors}
        if len(kinds) > 1 or tensors[0].dim() == 0:
            found = ", ".join(sorted(f"{row.dtype} {list(row.shape)}" for row in tensors)[:4])
            raise DataError(f"rows must be tensors [length, ...] of one dtype and one trailing shape, got {found}")
        return cls.from_lengths(torch.cat(tensors), torch.tensor([len(row) for row in tensors]))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor, side: Side = "right") -> Ragged:
        """Return the rows of `padded` [rows, width, ...] without the padding at `side`; `lengths` is int64 [rows].

        Raises DataError for lengths that do not fit `padded`.
        """
        lengths = lengths.cpu().to(torch.int64)
        if padded.dim() < 2 or lengths.shape != padded.shape[:1]:
            raise DataError(f"{list(lengths.shape)} lengths do not fit a padded tensor {list(padded.shape)}")
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= padded.shape[1]:
            raise DataError(f"lengths must be from 0 to the width {padded.shape[1]}, got {lengths.tolist()[:8]}")
        return cls.from_lengths(padded[_inside(lengths.to(padded.device), padded.shape[1], side)], lengths)

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, in order; DataError for no parts, or parts that differ in dtype or shape."""
        if not parts:
            raise DataError("nothing to concatenate: the list of ragged tensors is empty")
        kinds = {(part.dtype, part.values.shape[1:]) for part in parts}
        if len(kinds) > 1:
            found = sorted((str(dtype), tuple(shape)) for dtype, shape in kinds)
            raise DataError(f"ragged tensors to concatenate differ in dtype or shape: {found}")
        lengths = np.concatenate([part._lengths for part in parts])
        return cls._trusted(torch.cat([part.values for part in parts]), _ends(lengths))

    @property
    def offsets(self) -> Tensor:
        """The start of each row in the values, and the end of the last: int64 [rows + 1], on the CPU."""
        return torch.from_numpy(self._ends)

    @property
    def lengths(self) -> Tensor:
        """The length of each row, int64 [rows], on the CPU."""
        return torch.from_numpy(self._lengths)

    @property
    def _lengths(self) -> np.ndarray:
        return self._ends[1:] - self._ends[:-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the values and the offsets."""
        return self.values.nbytes + self._ends.nbytes

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: Index) -> Ragged: ...
    def __getitem__(self, index: int | Index) -> Tensor | Ragged:
        """Return one row as a view, or several rows as a Ragged; a slice shares storage."""
        if isinstance(index, (int, np.integer)):
            row = select_row(int(index), len(self))
            return self.values[int(self._ends[row]) : int(self._ends[row + 1])]
        return self.take(select_rows(index, len(self)))

    def take(self, rows: Rows) -> Ragged:
        """Return the rows of a checked selection; a slice shares storage, row numbers copy the values."""
        if isinstance(rows, slice):
            ends = self._ends[rows.start : rows.stop + 1]
            first = int(ends[0])
            # Offsets start at 0 in every Ragged; a slice from the first row shares them.
            return self._trusted(self.values[first : int(ends[-1])], ends - first if first else ends)
        chosen = rows.numpy()
        lengths = self._lengths[chosen]
        ends = _ends(lengths)
        # Position of each chosen value: its number in the result, moved by its row's shift.
        positions = np.arange(ends[-1]) + np.repeat(self._ends[chosen] - ends[:-1], lengths)
        return self._trusted(self.values[torch.from_numpy(positions).to(self.device)], ends)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.to_list())

    def to_list(self) -> list[Tensor]:
        """Return the rows as tensors [length, ...] that share storage with the values."""
        return list(self.values.split(self.lengths.tolist())) if len(self) else []

    def to_padded(self, pad_value: float = 0, length: int | None = None, side: Side = "right") -> Tensor:
        """Return [rows, width, ...] with `pad_value` at `side`; `length` is the width, by default the longest row's.

        Raises DataError when a row is longer than `length`.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if width < longest:
            raise DataError(f"a row has {longest} values, more than the width {width}; pass a larger length")
        padded = self.values.new_full((len(self), width, *self.values.shape[1:]), pad_value)
        padded[_inside(self.lengths.to(self.device), width, side)] = self.values
        return padded

    def with_values(self, values: Tensor) -> Ragged:
        """Return rows of the same lengths over other values, [total, ...] of any dtype; DataError for another total."""
        if values.dim() == 0 or len(values) != self._ends[-1]:
            raise DataError(f"these rows have {self._ends[-1]} values, got a tensor {list(values.shape)}")
        return self._trusted(values, self._ends)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Ragged:
        """Return rows of the same lengths over `fn(values)`; `fn` must be elementwise."""
        return self.with_values(fn(self.values))

    def to(self, device: str | torch.device) -> Ragged:
        """Return the rows with their values on `device`."""
        return self._trusted(self.values.to(device), self._ends)

    def detach(self) -> Ragged:
        """Return the rows with their values detached from the graph."""
        return self._trusted(self.values.detach(), self._ends)

    def clone(self) -> Ragged:
        """Return a copy that shares no storage."""
        return self._trusted(self.values.clone(), self._ends.copy())

    def equal(self, other: Ragged) -> bool:
        """Return whether dtype, lengths and all values are equal."""
        return (
            self.dtype == other.dtype
            and np.array_equal(self._ends, other._ends)
            and torch.equal(self.values, other.values)
        )

    def __repr__(self) -> str:
        shape = ", ".join(["*", *map(str, self.values.shape[1:])])
        return f"Ragged([{len(self)}, {shape}], {self.dtype}, {len(self.values)} values)"

    def __reduce__(self) -> tuple[Any, ...]:
        return ragged_of_arrays, self.arrays()

    def arrays(self) -> tuple[str, np.ndarray, np.ndarray]:
        """Return the dtype's name, the values and the offsets as arrays on the CPU, for `ragged_of_arrays`."""
        return (*to_array(self.values), self._ends)


def ragged_of_arrays(name: str, values: np.ndarray, ends: np.ndarray) -> Ragged:
    """Return the Ragged of the arrays from `Ragged.arrays`, over the same memory."""
    # torch.from_numpy warns of read-only arrays, such as those in Ray's shared memory.
    return Ragged._trusted(from_array(name, values), ends if ends.flags.writeable else ends.copy())


def _ends(lengths: np.ndarray) -> np.ndarray:
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _inside(lengths: Tensor, width: int, side: Side) -> Tensor:
    """Return bool [rows, width]: True on the values of a padded row, False on its padding."""
    if side not in ("left", "right"):
        raise DataError(f"side must be 'left' or 'right', got {side!r}")
    position = torch.arange(width, device=lengths.device)
    if side == "left":
        return position >= width - lengths[:, None]
    return position < lengths[:, None]
