"""verl's DataProto: a batch that its program writes to in place. It is a batch of rlcore's too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlcore import protocol
from rlcore.protocol.columns import Column, DenseColumn, Kind, ObjectColumn, RaggedColumn, check_name, column_of
from rlcore.protocol.dataproto import OBJECT, TENSOR
from rlcore.protocol.remote import RemoteColumn
from rlcore.protocol.rows import Index
from rlcore.protocol.table import Table
from rlcore.protocol.views import DataProtoItem, ObjectColumns, TensorColumns


class WritableTensor(DenseColumn):
    """A tensor that readers get itself. Slices of it are views. Only batches of this module hold one."""

    def read(self) -> Tensor:
        """Return the tensor's memory, not a copy. A reader who reshapes or resizes it in place changes no rows."""
        return self._tensor.detach()

    def row(self, row: int) -> Tensor:
        """Return a view of the row."""
        return self._tensor[row]

    def immutable(self) -> Column:
        """Return a copy."""
        return DenseColumn(super().read())


class WritableRagged(RaggedColumn):
    """A Ragged that readers get itself; see WritableTensor."""

    def read(self) -> protocol.Ragged:
        """Return the Ragged, not a copy."""
        return self._ragged

    def row(self, row: int) -> Tensor:
        """Return a view of the row."""
        return self._ragged[row]

    def immutable(self) -> Column:
        """Return a copy."""
        return RaggedColumn(super().read())

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiver may get read-only memory, so it must copy before it writes.
        return RaggedColumn, (self._ragged,)


class WritableObjects(ObjectColumn):
    """An object array that readers get itself; see WritableTensor."""

    def read(self) -> np.ndarray:
        """Return the array, not a copy."""
        return self._objects

    def immutable(self) -> Column:
        """Return a copy of the array, of the same objects."""
        return ObjectColumn(super().read())

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectColumn, (self._objects,)


_WRITABLE = {"dense": WritableTensor, "ragged": WritableRagged, "object": WritableObjects}


def _writable_column(name: str, value: Any) -> Column:
    """Return the column of `column_of`, but of a tensor or an object array [rows] over the same memory."""
    check_name(name)
    if isinstance(value, Tensor) and value.dim() and not value.is_nested:
        return WritableTensor(value.detach())
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
        return WritableObjects(value)
    return column_of(name, value)


class DataProto(protocol.DataProto):
    """A batch as verl's programs use it. It differs from rlcore's DataProto as follows.

    A read returns the contents themselves: `batch.batch["x"][0] = 5` changes the batch. A bound tensor is not copied.
    Slices, parts of `split` and `chunk`, single rows and `select` share memory with the batch; all else copies, and so
    do calls of workers, and rlcore's own batches. `reorder`, `rename`, `union` and `to` change this batch and return
    it. `batch` and `non_tensor_batch` can be set. `split` may leave a smaller last part. All checks of rlcore's
    DataProto hold, with DataError.
    """

    __slots__ = ()
    _column_of = staticmethod(_writable_column)

    @property
    def table(self) -> Table:
        """The columns and meta_info; columns in this process are writable."""
        table = super().table
        for name, column in table.columns.items():
            if not isinstance(column, (RemoteColumn, WritableTensor, WritableRagged, WritableObjects)):
                table.columns[name] = _WRITABLE[column.kind](column.read())  # a copy: others may hold the column
        return table

    @property
    def batch(self) -> TensorColumns:
        """The tensor columns; setting it replaces all of them."""
        return super().batch

    @batch.setter
    def batch(self, columns: Mapping[str, Any] | None) -> None:
        self._replace(TENSOR, columns)

    @property
    def non_tensor_batch(self) -> ObjectColumns:
        """The object columns; setting it replaces all of them."""
        return super().non_tensor_batch

    @non_tensor_batch.setter
    def non_tensor_batch(self, columns: Mapping[str, Any] | None) -> None:
        self._replace(OBJECT, columns)

    def _replace(self, kinds: tuple[Kind, ...], columns: Mapping[str, Any] | None) -> None:
        others = {name: column for name, column in self.table.columns.items() if column.kind not in kinds}
        given = {} if columns is None else dict(columns.items())
        replaced = self._of(Table(others, self.meta_info, bare_rows=0 if given else len(self)))
        for name, value in given.items():
            replaced._bind(name, value, kinds)
        if len(replaced) == len(self):
            replaced.table.kept = self.table.kept
        self._source = replaced.table

    def _read(self, name: str, kinds: tuple[Kind, ...] = TENSOR + OBJECT) -> Any:
        column = self.table.column(name, kinds)
        if isinstance(column, RemoteColumn):
            self.table.columns[name] = column.fetch()
        return super()._read(name, kinds)

    # -- memory that is shared: the columns come here first, so that both sides write to the same

    def _item(self, row: int) -> DataProtoItem:
        self.materialize()
        return super()._item(row)

    def __getitem__(self, index: str | int | Index) -> Any:
        """Return one row by number, or the rows of a slice, as views; the rows of a list or mask as copies."""
        if isinstance(index, slice):
            self.materialize()
        return super().__getitem__(index)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows `start:end:step`, as views if the step is 1."""
        return self.materialize()._of(super().slice(start, end, step).table)

    def split(self, split_size: int | Sequence[int], uneven: bool = True) -> list[Self]:
        """Return consecutive parts of `split_size` rows, the last perhaps smaller, or of the listed sizes, as views."""
        self.materialize()
        return super().split(split_size, uneven)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of the named columns and meta_info, over the same memory; objects are copied by `deepcopy`."""
        self.materialize()
        return super().select(batch_keys, non_tensor_batch_keys, meta_info_keys, deepcopy)

    # -- changes in place

    def reorder(self, indices: Index) -> Self:
        """Put row `indices[i]` at position i of this batch, and return it."""
        return self._become(super().reorder(indices))

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename columns of this batch, and return it."""
        return self._become(super().rename(old_keys, new_keys))

    def union(self, other: protocol.DataProto) -> Self:
        """Add copies of another batch's columns, and its meta_info, to this batch, and return it."""
        return self._become(super().union(other))

    def to(self, device: str | torch.device) -> Self:
        """Move this batch's tensors to a device, and return it."""
        return self._become(super().to(device))

    def _become(self, changed: Self) -> Self:
        self.meta_info.update(changed.meta_info)
        changed.table.meta_info = self.meta_info
        self._source = changed.table
        return self
