# ruff: noqa: D102  (Column says what its methods do)
"""Columns: what a DataProto is made of.

A column is immutable and knows its rows; everything that a batch does with rows is `take` and `cat`. The three kinds
here hold their contents in this process. A column whose contents are elsewhere implements the same abstract class, and
nothing above this module changes.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.buffers import from_array, to_array
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.rows import Rows

Kind: TypeAlias = Literal["dense", "ragged", "object"]
Value: TypeAlias = Tensor | Ragged | np.ndarray
"""What a read of a column gives: a tensor [rows, ...], a Ragged, or an object array [rows]."""


class ColumnSpec(NamedTuple):
    """What a column is apart from its contents: kind, dtype (None for objects), shape of a row's entry, device.

    The entry is the row of a dense column and one value of a ragged one's row.
    """

    kind: Kind
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: str

    @classmethod
    def ragged(cls, dtype: torch.dtype, *entry: int) -> ColumnSpec:
        """Return the form of rows of different length, of values of this shape."""
        return cls("ragged", dtype, entry, "cpu")

    @classmethod
    def dense(cls, dtype: torch.dtype, *row: int) -> ColumnSpec:
        """Return the form of a tensor [rows, *row]."""
        return cls("dense", dtype, row, "cpu")

    @classmethod
    def objects(cls) -> ColumnSpec:
        """Return the form of an object column."""
        return cls("object", None, (), "cpu")

    def exact_bytes(self, rows: int) -> int | None:
        """Return how many bytes so many rows have; None for objects and ragged rows, of which it does not say."""
        if self.dtype is None or self.kind == "ragged":
            return None
        return rows * math.prod(self.shape) * self.dtype.itemsize

    def estimated_bytes(self, rows: int) -> int:
        """Return about how many bytes so many rows have: of objects and ragged rows it knows no more than a scale."""
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
    """One named value for each row of a batch, of one kind, immutable."""

    kind: Kind

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def view(self) -> Value:
        """Return the contents without a copy; whoever reads them must not write to them."""

    @abstractmethod
    def read(self) -> Value:
        """Return the contents as a private copy (of an object column: a new array of the same objects)."""

    @abstractmethod
    def row(self, row: int) -> Any:
        """Return one row: a private tensor, or the object."""

    @abstractmethod
    def take(self, rows: Rows) -> Column:
        """Return the column of the selected rows; a slice shares storage with this one."""

    @abstractmethod
    def cat(self, others: Sequence[Column]) -> Column:
        """Return this column's rows and then the others', all of the same form."""

    @abstractmethod
    def unfold(self, parts: int) -> Column:
        """Return each row cut along its first dimension into `parts` equal rows; DataError where they do not fit."""

    @abstractmethod
    def to(self, device: str | torch.device) -> Column:
        """Return the column with its tensors on `device`."""

    @abstractmethod
    def spec(self) -> ColumnSpec:
        """Return what the column is apart from its contents; columns of equal form can be concatenated."""

    def type_name(self) -> str:
        """Return the form in words."""
        return str(self.spec())

    def same_as(self, other: Column) -> bool:
        """Whether the other is known to hold the same contents without a look at them."""
        return self is other

    def deepcopy(self) -> Column:
        """Return a column whose objects are deep copies; tensors are immutable and stay."""
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
        return self._tensor.clone(memory_format=torch.contiguous_format)

    def row(self, row: int) -> Tensor:
        return self._tensor[row].clone()

    def take(self, rows: Rows) -> DenseColumn:
        return DenseColumn(self._tensor[rows if isinstance(rows, slice) else rows.to(self._tensor.device)])

    def cat(self, others: Sequence[Column]) -> DenseColumn:
        return DenseColumn(torch.cat([_tensor(column) for column in (self, *others)]))

    def unfold(self, parts: int) -> DenseColumn:
        shape = self._tensor.shape
        if len(shape) < 2 or shape[1] % parts:
            raise DataError(f"the second dimension of shape {list(shape)} cannot be cut into {parts} equal parts")
        return DenseColumn(self._tensor.reshape(shape[0] * parts, shape[1] // parts, *shape[2:]))

    def to(self, device: str | torch.device) -> DenseColumn:
        return DenseColumn(self._tensor.to(device))

    def spec(self) -> ColumnSpec:
        return ColumnSpec("dense", self._tensor.dtype, tuple(self._tensor.shape[1:]), str(self._tensor.device))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_dense, to_array(self._tensor)


class RaggedColumn(Column):
    """Rows of different length without padding."""

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

    def take(self, rows: Rows) -> RaggedColumn:
        return RaggedColumn(self._ragged.take(rows))

    def cat(self, others: Sequence[Column]) -> RaggedColumn:
        return RaggedColumn(Ragged.cat([_ragged(column) for column in (self, *others)]))

    def unfold(self, parts: int) -> RaggedColumn:
        lengths = self._ragged.lengths
        uneven = (lengths % parts).nonzero().flatten()
        if len(uneven):
            row = int(uneven[0])
            raise DataError(f"row {row} has {int(lengths[row])} values, which cannot be cut into {parts} equal parts")
        return RaggedColumn(Ragged.from_lengths(self._ragged.values, (lengths // parts).repeat_interleave(parts)))

    def to(self, device: str | torch.device) -> RaggedColumn:
        return RaggedColumn(self._ragged.to(device))

    def spec(self) -> ColumnSpec:
        values = self._ragged.values
        return ColumnSpec("ragged", values.dtype, tuple(values.shape[1:]), str(values.device))


class ObjectColumn(Column):
    """One Python object a row, in an object array [rows]."""

    kind = "object"

    def __init__(self, objects: np.ndarray) -> None:
        self._objects = objects

    def __len__(self) -> int:
        return len(self._objects)

    def view(self) -> np.ndarray:
        view = self._objects.view()
        view.flags.writeable = False
        return view

    def read(self) -> np.ndarray:
        return self._objects.copy()

    def row(self, row: int) -> Any:
        return self._objects[row]

    def take(self, rows: Rows) -> ObjectColumn:
        return ObjectColumn(self._objects[rows if isinstance(rows, slice) else rows.numpy()])

    def cat(self, others: Sequence[Column]) -> ObjectColumn:
        return ObjectColumn(np.concatenate([np.asarray(column.view()) for column in (self, *others)]))

    def unfold(self, parts: int) -> ObjectColumn:
        cut = []
        for row, value in enumerate(self._objects):
            if not isinstance(value, (list, tuple, np.ndarray)) or len(value) % parts:
                raise DataError(f"row {row} is no sequence that can be cut into {parts} equal parts: {value!r:.80}")
            size = len(value) // parts
            cut += [value[part * size : (part + 1) * size] for part in range(parts)]
        return ObjectColumn(_object_array(cut))

    def to(self, device: str | torch.device) -> ObjectColumn:
        return self

    def spec(self) -> ColumnSpec:
        return ColumnSpec("object", None, (), "cpu")

    def deepcopy(self) -> ObjectColumn:
        return ObjectColumn(copy.deepcopy(self._objects))


def column_of(name: str, value: Any) -> Column:
    """Return a column that holds a private copy of `value`, detached from any graph.

    A tensor [rows, ...] is dense; a Ragged or a nested tensor is ragged; a list, tuple or array has one object a row.
    Raises DataError naming the column for anything else.
    """
    if not isinstance(name, str) or not name:
        raise DataError(f"a column's name is a string that is not empty, got {name!r}")
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
        f"column {name!r} cannot be {shown}; bind a tensor [rows, ...], a Ragged, or a list or array of one entry a row"
    )


def same_contents(left: Any, right: Any) -> bool:
    """Return whether two values are equal in type, dtype, shape and all contents; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, Column) and isinstance(right, Column):
        return left.same_as(right) or (left.spec() == right.spec() and same_contents(left.view(), right.view()))
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _same_values(left, right)
    if isinstance(left, Ragged):
        return torch.equal(left.offsets, right.offsets) and same_contents(left.values, right.values)
    if isinstance(left, np.ndarray):
        return left.shape == right.shape and left.dtype == right.dtype and same_contents(left.tolist(), right.tolist())
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same_contents(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_contents, left, right))
    return bool(left == right) or bool(left != left and right != right)


def _same_values(left: Tensor, right: Tensor) -> bool:
    right = right.to(left.device)
    if torch.equal(left, right):
        return True
    return left.dtype.is_floating_point and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return an object array [rows] of the entries; numpy would make a table of equally long lists."""
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
