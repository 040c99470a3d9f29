"""The tensor and object columns of a DataProto as mappings: verl's `batch.batch` and `batch.non_tensor_batch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlcore.errors import DataError
from rlcore.protocol.columns import Column, Kind, column_of

if TYPE_CHECKING:
    from rlcore.protocol.dataproto import DataProto


@dataclass(frozen=True)
class DataProtoItem:
    """One row: `batch` holds its tensors, without the row dimension, `non_tensor_batch` its objects."""

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        for columns in (self.batch, self.non_tensor_batch):
            if name in columns:
                return columns[name]
        raise DataError(f"the row has no column {name!r}; it has {[*self.batch, *self.non_tensor_batch]}")

    def __contains__(self, name: object) -> bool:
        return name in self.batch or name in self.non_tensor_batch


class _ColumnView:
    """A live mapping of a DataProto's columns of some kinds: reads return private copies, writes bind columns."""

    __slots__ = ("_parent",)
    _kinds: ClassVar[tuple[Kind, ...]]
    _takes: ClassVar[str]

    def __init__(self, parent: DataProto) -> None:
        self._parent = parent

    def _columns(self) -> dict[str, Column]:
        return {name: column for name, column in self._parent.table.columns.items() if column.kind in self._kinds}

    def __getitem__(self, name: Any) -> Any:
        return self._parent.table.column(name, self._kinds).read()

    def __setitem__(self, name: str, value: Any) -> None:
        column = column_of(name, value)
        if column.kind not in self._kinds:
            raise DataError(f"column {name!r} must be {self._takes}, got {type(value).__name__}")
        self._parent.table.bind(name, column)

    def __delitem__(self, name: str) -> None:
        self._parent.table.column(name, self._kinds)
        del self._parent.table.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a column, or `default` when it is missing."""
        column = self._columns().get(name)
        return default if column is None else column.read()

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a column and return its contents; if it is missing, return `default` or raise DataError."""
        if default and name not in self:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def keys(self) -> list[str]:
        """Return the column names, in order of binding."""
        return list(self._columns())

    def values(self) -> Iterator[Any]:
        """Iterate over the contents, in the order of the names."""
        return (column.read() for column in self._columns().values())

    def items(self) -> Iterator[tuple[str, Any]]:
        """Iterate over names and contents."""
        return ((name, column.read()) for name, column in self._columns().items())

    def update(self, other: Mapping[str, Any]) -> None:
        """Bind every column of a mapping."""
        for name, value in other.items():
            self[name] = value

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {column.type_name()}" for name, column in self._columns().items())
        return f"{type(self).__name__}({{{columns}}})"


class ObjectColumns(_ColumnView):
    """The object columns: name to object array [rows]."""

    _kinds = ("object",)
    _takes = "a list or an array, not a tensor"

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._columns())


class TensorColumns(_ColumnView):
    """The tensor columns with TensorDict's surface: name to tensor [rows, ...] or Ragged.

    As in a TensorDict, its length is the number of rows, and an index other than a name selects rows.
    """

    _kinds = ("dense", "ragged")
    _takes = "a tensor [rows, ...] or a Ragged"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return super().__getitem__(index)
        return self._parent[index].batch

    def __len__(self) -> int:
        return len(self._parent)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (item.batch for item in self._parent)

    @property
    def batch_size(self) -> torch.Size:
        """`torch.Size([rows])`."""
        return torch.Size([len(self._parent)])

    shape = batch_size  # TensorDict has both names

    def is_empty(self) -> bool:
        """Return whether the batch has no tensor columns."""
        return not self._columns()

    def set(self, name: str, value: Any) -> TensorColumns:
        """Bind a tensor column."""
        self[name] = value
        return self

    def select(self, *names: str) -> TensorColumns:
        """Return the named tensor columns, as a view of a new batch."""
        return self._parent.select(batch_keys=names, non_tensor_batch_keys=()).batch

    def exclude(self, *names: str) -> TensorColumns:
        """Return all other tensor columns, as a view of a new batch."""
        return self.select(*[name for name in self.keys() if name not in names])

    def rename_key_(self, old: str, new: str) -> TensorColumns:
        """Rename a column in this batch."""
        renamed = self._parent.rename(old, new)
        self._parent.table.columns = renamed.table.columns
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as a dict of private tensors."""
        return dict(self.items())

    def to_tensordict(self) -> Any:
        """Return the columns as a new `tensordict.TensorDict`; a ragged column becomes a jagged nested tensor."""
        return self._parent.select(non_tensor_batch_keys=(), meta_info_keys=()).to_tensordict()
