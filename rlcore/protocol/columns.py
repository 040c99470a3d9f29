# ruff: noqa: D102  (Column documents its methods)
"""The columns of a DataProto.

A column is immutable. A batch selects and joins rows with a column's `take` and `cat` only. The three kinds here hold
their contents in this process; remote.py implements the same abstract class for contents in another process.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.buffers import from_array, to_array
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.rows import Rows

Kind: TypeAlias = Literal["dense", "ragged", "object"]
Value: TypeAlias = Tensor | Ragged | np.ndarray
"""The contents of a column: a tensor [rows, ...], a Ragged, or an object array [rows]."""


class ColumnSpec(NamedTuple):
    """The type of a column: kind, dtype (None for objects), `shape` of an entry, device of the tensors.

    An entry is a row of a dense column, or one of the values in a row of a ragged column.
    """

    kind: Kind
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: str

    @classmethod
    def ragged(cls, dtype: torch.dtype, *entry: int) -> ColumnSpec:
        """Return the spec of a ragged column on the CPU, with values of shape `entry`."""
        return cls("ragged", dtype, entry, "cpu")

    @classmethod
    def dense(cls, dtype: torch.dtype, *row: int) -> ColumnSpec:
        """Return the spec of a tensor [rows, *row] on the CPU."""
        return cls("dense", dtype, row, "cpu")

    @classmethod
    def objects(cls) -> ColumnSpec:
        """Return the spec of an object column."""
        return cls("object", None, (), "cpu")

    def exact_bytes(self, rows: int) -> int | None:
        """Return the size of a column of `rows` rows in bytes; None for objects and ragged rows, whose sizes vary."""
        if self.dtype is None or self.kind == "ragged":
            return None
        return rows * math.prod(self.shape) * self.dtype.itemsize

    def estimated_bytes(self, rows: int) -> int:
        """Return a rough size of a column of `rows` rows in bytes: 100 per object, and 100 values per ragged row."""
        if self.dtype is None:
            return 100 * rows
        return rows * math.prod(self.shape) * self.dtype.itemsize * (100 if self.kind == "ragged" else 1)

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        sizes = "".join(f", {size}" for size in self.shape)
        ragged = ", *" if self.kind == "ragged" else ""
        device = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.kind} {self.dtype} [rows{ragged}{sizes}]{device}"


class Column(ABC):
    """One value for each row of a batch, all of one kind; immutable."""

    kind: Kind

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def view(self) -> Value:
        """Return the contents without a copy; the caller must not write to them."""

    @abstractmethod
    def read(self) -> Value:
        """Return a private copy of the contents; of an object column, a new array of the same objects."""

    @abstractmethod
    def row(self, row: int) -> Any:
        """Return one row: a private tensor, or the object."""

    @abstractmethod
    def take(self, rows: Rows) -> Column:
        """Return the column of the selected rows; a slice shares storage with this one."""

    @abstractmethod
    def cat(self, others: Sequence[Column]) -> Column:
        """Return the rows of this column and then those of the others; all columns must have the same spec."""

    @abstractmethod
    def to(self, device: str | torch.device) -> Column:
        """Return the column with its tensors on `device`."""

    @abstractmethod
    def spec(self) -> ColumnSpec:
        """Return the column's type. Columns of equal spec can be concatenated."""

    def type_name(self) -> str:
        """Return the spec in words, for messages."""
        return str(self.spec())

    def same_as(self, other: Column) -> bool:
        """Whether both columns are known to hold the same contents without comparing them."""
        return self is other

    def deepcopy(self) -> Column:
        """Return a column with deep copies of the objects; tensors are immutable and shared."""
        return self

    def immutable(self) -> Column:
        """Return a column of the same contents, which nobody writes to; of one whose readers may write, a copy."""
        return self


class DenseColumn(Column):
    """A tensor [rows, ...]."""

    kind = "dense"

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def view(self) -> Tensor:
        return self._tensor

    def read(self) -> Tensor:
        # A clone: columns are immutable and shared, and the reader may write.
        return self._tensor.clone(memory_format=torch.contiguous_format)

    def row(self, row: int) -> Tensor:
        return self._tensor[row].clone()

    def take(self, rows: Rows) -> Self:
        return type(self)(self._tensor[rows if isinstance(rows, slice) else rows.to(self._tensor.device)])

    def cat(self, others: Sequence[Column]) -> DenseColumn:
        return DenseColumn(torch.cat([_tensor(column) for column in (self, *others)]))

    def to(self, device: str | torch.device) -> Self:
        return type(self)(self._tensor.to(device))

    def spec(self) -> ColumnSpec:
        return ColumnSpec("dense", self._tensor.dtype, tuple(self._tensor.shape[1:]), str(self._tensor.device))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_dense, to_array(self._tensor)


class RaggedColumn(Column):
    """Rows of different lengths without padding."""

    kind = "ragged"

    def __init__(self, ragged: Ragged) -> None:
        self._ragged = ragged

    def __len__(self) -> int:
        return len(self._ragged)

    def view(self) -> Ragged:
        return self._ragged

    def read(self) -> Ragged:
        return self._ragged.clone()

    def row(self, row: int) -> Tensor:
        return self._ragged[row].clone()

    def take(self, rows: Rows) -> Self:
        return type(self)(self._ragged.take(rows))

    def cat(self, others: Sequence[Column]) -> RaggedColumn:
        return RaggedColumn(Ragged.cat([_ragged(column) for column in (self, *others)]))

    def to(self, device: str | torch.device) -> Self:
        return type(self)(self._ragged.to(device))

    def spec(self) -> ColumnSpec:
        values = self._ragged.values
        return ColumnSpec("ragged", values.dtype, tuple(values.shape[1:]), str(values.device))


class ObjectColumn(Column):
    """One Python object per row, in an object array [rows]."""

    kind = "object"

    def __init__(self, objects: np.ndarray) -> None:
        self._objects = objects

    def __len__(self) -> int:
        return len(self._objects)

    def view(self) -> np.ndarray:
        # Read-only, so that a write raises instead of changing every batch that shares the array.
        view = self._objects.view()
        view.flags.writeable = False
        return view

    def read(self) -> np.ndarray:
        return self._objects.copy()

    def row(self, row: int) -> Any:
        return self._objects[row]

    def take(self, rows: Rows) -> Self:
        return type(self)(self._objects[rows if isinstance(rows, slice) else rows.numpy()])

    def cat(self, others: Sequence[Column]) -> ObjectColumn:
        return ObjectColumn(np.concatenate([np.asarray(column.view()) for column in (self, *others)]))

    def to(self, device: str | torch.device) -> Self:
        return self

    def spec(self) -> ColumnSpec:
        return ColumnSpec("object", None, (), "cpu")

    def deepcopy(self) -> ObjectColumn:
        return ObjectColumn(copy.deepcopy(self._objects))


def column_of(name: str, value: Any) -> Column:
    """Return a column with a private copy of `value`, detached from any graph.

    A tensor [rows, ...] becomes a dense column, a Ragged or a nested tensor a ragged one, and a list, tuple or numpy
    array an object column with one object per row. Raises DataError naming the column for any other value.
    """
    check_name(name)
    if isinstance(value, Ragged):
        return RaggedColumn(value.detach().clone())
    if isinstance(value, Tensor) and value.is_nested:
        return RaggedColumn(Ragged.from_list([row.detach() for row in value.unbind()], dtype=value.dtype))
    if isinstance(value, Tensor) and value.dim():
        return DenseColumn(value.detach().clone(memory_format=torch.contiguous_format))
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return ObjectColumn(_object_array(value))
    shown = "a tensor without dimensions" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.80}"
    raise DataError(
        f"column {name!r} cannot be {shown}; bind a tensor [rows, ...], a Ragged, or a list or array, one entry per row"
    )


def check_name(name: Any) -> None:
    """Raise DataError unless `name` may name a column."""
    if not isinstance(name, str) or not name:
        raise DataError(f"a column's name must be a non-empty string, got {name!r}")


def same_contents(left: Any, right: Any) -> bool:
    """Return whether two values are equal in type, dtype, shape and all contents; NaN equals NaN.

    Raises DataError for values that contain themselves, or nest too deeply to be compared.
    """
    try:
        return _same(left, right)
    except RecursionError:
        raise DataError(
            "two values cannot be compared, as they contain themselves or nest too deeply; keep such objects out of a "
            "batch, or leave one of the two columns out with select()"
        ) from None


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, Column) and isinstance(right, Column):
        return left.same_as(right) or (left.spec() == right.spec() and _same(left.view(), right.view()))
    if type(left) is not type(right):
        return False
    if type(left) not in _SCALARS:
        # A loop, not a lookup: subclasses (dict for Mapping) count too.
        for kind, same in _COMPARISONS.items():
            if isinstance(left, kind):
                return same(left, right)
    # The second part is for NaN, the only value that differs from itself.
    return bool(left == right) or bool(left != left and right != right)


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    # Equality first: it stops early and makes no masks, and NaN is rare.
    if torch.equal(left, right):
        return True
    return left.dtype.is_floating_point and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_ragged(left: Ragged, right: Ragged) -> bool:
    return torch.equal(left.offsets, right.offsets) and _same_tensors(left.values, right.values)


def _same_arrays(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and _same(left.tolist(), right.tolist())


def _same_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)


def _same_sequences(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(_same, left, right))


_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    Tensor: _same_tensors,
    Ragged: _same_ragged,
    np.ndarray: _same_arrays,
    Mapping: _same_mappings,
    list: _same_sequences,
    tuple: _same_sequences,
}
"""How two values of one type are compared."""
_SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types compared with `==`, without a search in the table above."""


def _object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return an object array [rows] of the entries. `np.array` would turn lists of equal length into a 2-D array."""
    array = np.empty(len(values), dtype=object)
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = [row.copy() for row in values]
    for row, value in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
        array[row] = value
    return array


def _tensor(column: Column) -> Tensor:
    value = column.view()
    assert isinstance(value, Tensor)
    return value


def _ragged(column: Column) -> Ragged:
    value = column.view()
    assert isinstance(value, Ragged)
    return value


def _unpickle_dense(name: str, array: np.ndarray) -> DenseColumn:
    return DenseColumn(from_array(name, array))
