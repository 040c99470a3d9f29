"""The tensor and object columns of a DataProto as mappings: verl's `batch.batch` and `batch.non_tensor_batch`."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from rlcore.errors import DataError
from rlcore.protocol.columns import Column, Kind, same_contents

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


class _ColumnView(MutableMapping[str, Any]):
    """A live mapping of a DataProto's columns of some kinds: reads return private copies, writes bind columns.

    Names are in order of binding. A missing name raises MissingColumnError.
    """

    __slots__ = ("_parent",)
    _kinds: ClassVar[tuple[Kind, ...]]

    def __init__(self, parent: DataProto) -> None:
        self._parent = parent

    def _columns(self) -> dict[str, Column]:
        return {name: column for name, column in self._parent.table.columns.items() if column.kind in self._kinds}

    def __getitem__(self, name: Any) -> Any:
        return self._parent._read(name, self._kinds)

    def __setitem__(self, name: str, value: Any) -> None:
        self._parent._bind(name, value, self._kinds)

    def __delitem__(self, name: str) -> None:
        self._parent.table.column(name, self._kinds)
        self._parent.table.drop(name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._columns())

    def __len__(self) -> int:
        return len(self._columns())

    def __contains__(self, name: object) -> bool:
        return name in self._columns()

    def __eq__(self, other: object) -> Any:
        """Return whether both map the same names to equal contents (NaN equals NaN).

        It is a numpy bool, so that TensorDict's `(left == right).all()` works.
        """
        if not isinstance(other, Mapping):
            return NotImplemented
        return np.bool_(same_contents(dict(self.items()), dict(other.items())))

    __hash__ = None  # type: ignore[assignment]

    # The inherited ones iterate, and TensorColumns iterates over rows.

    def update(self, other: Any = (), /, **columns: Any) -> None:
        """Bind all columns of a mapping, or of pairs."""
        for name, value in {**dict(other.items() if hasattr(other, "items") else other), **columns}.items():
            self[name] = value

    def clear(self) -> None:
        """Remove all columns of these kinds."""
        for name in self._columns():
            del self[name]

    def popitem(self) -> tuple[str, Any]:
        """Remove the column that was bound last, and return its name and contents; KeyError for none."""
        name = next(reversed(self._columns()))
        value = self[name]
        del self[name]
        return name, value

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {column.type_name()}" for name, column in self._columns().items())
        return f"{type(self).__name__}({{{columns}}})"


class ObjectColumns(_ColumnView):
    """The object columns: name to object array [rows]."""

    __slots__ = ()
    _kinds = ("object",)


class _TensorsByName(_ColumnView):
    """The tensor columns as an ordinary mapping: its length is the number of columns."""

    __slots__ = ()
    _kinds = ("dense", "ragged")


class TensorColumns(_TensorsByName):
    """The tensor columns with TensorDict's surface: name to tensor [rows, ...] or Ragged.

    As in a TensorDict, its length is the number of rows, iteration yields rows, and an index other than a name selects
    rows.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return super().__getitem__(index)
        return self._parent[index].batch

    def __len__(self) -> int:
        return len(self._parent)

    def __iter__(self) -> Iterator[Any]:
        return (item.batch for item in self._parent)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return KeysView(_TensorsByName(self._parent))

    def values(self) -> ValuesView[Any]:
        """Return the contents, in the order of the names."""
        return ValuesView(_TensorsByName(self._parent))

    def items(self) -> ItemsView[str, Any]:
        """Return names and contents."""
        return ItemsView(_TensorsByName(self._parent))

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
