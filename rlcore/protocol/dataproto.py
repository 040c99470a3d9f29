"""DataProto: named columns of equal row count and meta_info, with the methods of verl's DataProto.

Methods change neither the batch nor their arguments, except `batch[k] = v`, `pop`, and writes through `batch.batch`,
`batch.non_tensor_batch` and `batch.meta_info`. Contents are immutable and shared: a derived batch shares storage where
possible, binding a value copies it once, and a read returns a private copy. `view` reads without a copy, for callers
that do not write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.ops import episodes, one_row_each
from rlcore.protocol.columns import Column, Kind, column_of, same_contents
from rlcore.protocol.disk import load_table, save_table
from rlcore.protocol.moments import Moments, combine_moments, part_moments
from rlcore.protocol.remote import RemoteColumn, owner_of
from rlcore.protocol.row_operations import RowOperations
from rlcore.protocol.rows import Index, select_row, select_rows
from rlcore.protocol.small_columns import EncodedColumns, decode_columns, encode_columns, is_small
from rlcore.protocol.table import LazyTable, Table, concat_tables, union_tables
from rlcore.protocol.tensordicts import table_from_tensordict, table_to_tensordict
from rlcore.protocol.views import DataProtoItem, ObjectColumns, TensorColumns

TENSOR: tuple[Kind, ...] = ("dense", "ragged")
OBJECT: tuple[Kind, ...] = ("object",)


class DataProto(RowOperations):
    """A batch: dense tensors [rows, ...], ragged tensors and object columns [rows], and a dict `meta_info`.

    It differs from verl 0.9 as follows. `reorder`, `union`, `rename` and `to` return a new batch and do not change
    this one. Uneven `chunk` and `split` need `uneven=True`. A missing name is an error in `select` too. `rename` also
    takes object columns. `concat` treats the key `metrics` of meta_info like any other. An object column is always an
    array [rows]. Shuffling needs a seed. `save_to_disk` writes a folder. Rows stay when the last column leaves.
    """

    __slots__ = ("_source",)
    _column_of = staticmethod(column_of)

    def __init__(
        self,
        batch: Mapping[str, Any] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy tensor columns (a dict or TensorDict), object columns (lists or arrays) and meta_info into a new batch.

        A TensorDict's number of rows counts even without columns. Raises DataError for a column of the wrong kind or
        length, or a name given twice.
        """
        rows, *_ = getattr(batch, "batch_size", None) or (0,)
        self._source: Table | LazyTable = Table(meta_info=dict(meta_info or {}), bare_rows=rows)
        for kinds, columns in ((TENSOR, batch), (OBJECT, non_tensor_batch)):
            for name, value in ({} if columns is None else columns).items():
                if name in self:
                    raise DataError(f"column {name!r} is given twice, as a tensor and as an object column")
                self._bind(name, value, kinds)

    # -- construction

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a batch of these tensors (Tensor [rows, ...] or Ragged) and objects (one list entry per row)."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return a batch of these columns; a list or array becomes an object column."""
        batch = cls(meta_info=meta_info)
        for name, value in data.items():
            batch[name] = value
        return batch

    @classmethod
    def deferred(cls, fetch: Callable[[], DataProto]) -> Self:
        """Return a batch that calls `fetch` at the first operation on it, and then holds the batch that it returned.

        `fetch` runs once. If it raises, every operation raises its exception.
        """

        def table() -> Table:
            batch = fetch()
            if not isinstance(batch, DataProto):
                raise DataError(f"fetch of a deferred batch returned {type(batch).__name__}; it must return DataProto")
            # Another table: later bindings must not change the fetched batch.
            return batch.table.immutable()

        return cls._of(LazyTable(table))

    @classmethod
    def _of(cls, source: Table | LazyTable) -> Self:
        batch = cls.__new__(cls)
        batch._source = source
        return batch

    # -- contents

    @property
    def table(self) -> Table:
        """The columns and meta_info, for the core; fetched first if the batch is deferred."""
        return self._source.get() if isinstance(self._source, LazyTable) else self._source

    @property
    def is_ready(self) -> bool:
        """Whether all columns are computed: False while a call that returns one of them is running. Never waits."""
        if isinstance(self._source, LazyTable) and not self._source.ready:
            return False
        return all(column.is_ready for column in self.table.columns.values() if isinstance(column, RemoteColumn))

    def materialize(self) -> Self:
        """Fetch all columns and return this batch; raises the error of a call that failed to compute one."""
        self._source = self.table
        for name, column in self._source.columns.items():
            if isinstance(column, RemoteColumn):
                self._source.columns[name] = column.fetch()
        return self

    @property
    def batch(self) -> TensorColumns:
        """The tensor columns as a live mapping with TensorDict's surface."""
        return TensorColumns(self)

    @property
    def non_tensor_batch(self) -> ObjectColumns:
        """The object columns as a live mapping."""
        return ObjectColumns(self)

    @property
    def meta_info(self) -> dict[str, Any]:
        """Values for the whole batch, by name; this batch's own dict."""
        return self.table.meta_info

    @meta_info.setter
    def meta_info(self, value: Mapping[str, Any]) -> None:
        self.table.meta_info = dict(value)

    def __len__(self) -> int:
        return self.table.rows

    def __contains__(self, name: object) -> bool:
        return name in self.table.columns

    def keys(self) -> list[str]:
        """Return the names of all columns, in order of binding."""
        return list(self.table.columns)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def __getitem__(self, index: str | int | Index) -> Any:
        """Return a column by name (a private copy), one row by number, or a DataProto of the selected rows.

        A column is a tensor [rows, ...], a Ragged or an object array [rows]. A row number gives a DataProtoItem;
        a slice, a list of row numbers, a mask or an integer array gives a batch. Raises DataError
        for an unknown name or row.
        """
        if isinstance(index, str):
            return self._read(index)
        if isinstance(index, (int, np.integer)):
            return self._item(select_row(int(index), len(self)))
        return self._of(self.table.take(select_rows(index, len(self))))

    def __setitem__(self, name: str, value: Any) -> None:
        """Bind a copy of a tensor [rows, ...], Ragged, list or array to a name, in this batch only."""
        self._bind(name, value)

    def _bind(self, name: str, value: Any, kinds: tuple[Kind, ...] = TENSOR + OBJECT) -> None:
        """Bind a value to a name; DataError naming the column unless it is of one of these kinds."""
        column = self._column_of(name, value)
        if column.kind not in kinds:
            wanted = "a tensor [rows, ...] or a Ragged" if kinds == TENSOR else "a list or an array, not a tensor"
            raise DataError(f"column {name!r} must be {wanted}, got {type(value).__name__}")
        self.table.bind(name, column)

    def _read(self, name: str, kinds: tuple[Kind, ...] = TENSOR + OBJECT) -> Any:
        """Return the contents of a column of one of these kinds, for a reader who may write to them."""
        return self.table.column(name, kinds).read()

    def view(self, name: str) -> Any:
        """Return a column's contents without a copy. Other batches share them: never write to them."""
        return self.table.column(name).view()

    def _item(self, row: int) -> DataProtoItem:
        columns = self.table.columns.items()
        return DataProtoItem(
            batch={name: column.row(row) for name, column in columns if column.kind != "object"},
            non_tensor_batch={name: column.row(row) for name, column in columns if column.kind == "object"},
            meta_info=dict(self.meta_info),
        )

    def equal(self, other: DataProto) -> bool:
        """Return whether both have equal rows, columns (NaN equals NaN) and meta_info, in any order of the names."""
        same = len(self) == len(other) and same_contents(self.table.columns, other.table.columns)
        return same and same_contents(self.meta_info, other.meta_info)

    def __repr__(self) -> str:
        if not self.is_ready:
            return "DataProto(deferred)"
        columns = ", ".join(f"{name}: {column.type_name()}" for name, column in self.table.columns.items())
        return f"DataProto(rows={len(self)}, {{{columns}}}, meta_info={list(self.meta_info)})"

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.table.columns
        # Many small columns cost less as one buffer than as one pickle each.
        small = {name: column for name, column in columns.items() if is_small(column)}
        others = {name: column for name, column in columns.items() if name not in small}
        rest = others, self.table.meta_info, self.table.rows
        return _unpickle, (type(self), list(columns), encode_columns(small), *rest)

    # -- columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of the named tensor columns, object columns and meta_info; all of a kind whose names are None.

        With `deepcopy` the objects of object columns are copied too. Raises DataError for a missing name.
        """
        table = self.table
        wanted: dict[str, None] = {}
        for kinds, names in ((TENSOR, batch_keys), (OBJECT, non_tensor_batch_keys)):
            of_kind = [name for name, column in table.columns.items() if column.kind in kinds]
            for name in of_kind if names is None else names:
                table.column(name, kinds)
                wanted[name] = None
        columns = {name: column for name, column in table.columns.items() if name in wanted}
        if deepcopy:
            columns = {name: column.deepcopy() for name, column in columns.items()}
        selected = table.with_columns(columns)
        if meta_info_keys is not None:
            selected.meta_info = {key: table.meta(key) for key in meta_info_keys}
        return self._of(selected)

    def pop(
        self,
        batch_keys: Iterable[str] = (),
        non_tensor_batch_keys: Iterable[str] = (),
        meta_info_keys: Iterable[str] = (),
    ) -> Self:
        """Remove the named columns and meta_info from this batch and return them as another of the same rows.

        Raises DataError for a missing name, and then removes nothing.
        """
        tensors, objects, keys = list(batch_keys or ()), list(non_tensor_batch_keys or ()), list(meta_info_keys or ())
        # `select` checks all names first, so an error removes nothing.
        popped = self.select(tensors, objects, keys)
        for name in popped.table.columns:
            self.table.drop(name)
        for key in popped.table.meta_info:
            del self.table.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Return a batch with the columns `old_keys`, of any kind, renamed to `new_keys`; their order stays.

        Raises DataError when a column is missing, the lists differ in length, or two columns would share a name.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new) or len(set(old)) != len(old):
            raise DataError(f"rename needs one new name for each column, and each column once, got {old} and {new}")
        for name in old:
            self.table.column(name)
        names = dict(zip(old, new, strict=True))
        renamed: dict[str, Any] = {}
        for name, column in self.table.columns.items():
            target = names.get(name, name)
            if target in renamed:
                raise DataError(f"rename {old} to {new} gives two columns the name {target!r}; pop one of them first")
            renamed[target] = column
        return self._of(self.table.with_columns(renamed))

    def union(self, other: DataProto) -> Self:
        """Return the columns and meta_info of both batches; row i of one belongs to row i of the other.

        If one batch is `keeping` some rows of the other, the result has only these. Raises DataError when the row
        counts differ otherwise, or naming a column or key that both have with different contents. A batch without
        columns and rows fits any row count.
        """
        return self._of(union_tables(self.table, other.table.immutable()))

    def keeping(self, mask: Tensor) -> Self:
        """Return the rows where `mask` (bool [rows]) is True; `union` with a batch of all rows then keeps these alone.

        `select`, `rename`, `union` and `[:]` of the result still know the rows; any other selection does not.
        """
        rows = select_rows(mask, len(self))
        table = self.table.take(slice(0, len(self)) if bool(mask.all()) else rows)
        table.kept = None if bool(mask.all()) else mask.clone()
        return self._of(table)

    def to(self, device: str | torch.device) -> Self:
        """Return the batch with its tensors on `device`."""
        columns = {name: column.to(device) for name, column in self.table.columns.items()}
        return self._of(self.table.with_columns(columns))

    @classmethod
    def concat(cls, data: Sequence[DataProto]) -> Self:
        """Return the rows of all batches in order, with the meta_info of all.

        Raises DataError for an empty list, columns that differ in name, kind, dtype or row shape, and conflicting
        meta_info. A batch without columns and rows adds only its meta_info.
        """
        return cls._of(concat_tables([batch.table for batch in data]).immutable())

    # -- arithmetic in the processes that hold the rows

    def map(
        self,
        fn: Callable[[DataProto], Mapping[str, Any] | DataProto],
        reads: Sequence[str],
        keep_together: str | None = None,
    ) -> Self:
        """Return the columns that `fn` computes, row for row, from a batch of the columns `reads`.

        `fn` is a pure module-level function, or a functools.partial of one, and returns a dict of columns or a
        DataProto. It runs on parts of the batch in the workers that hold the rows, or in this process if all rows are
        here. Rows with equal values of the column `keep_together` reach it together. Raises DataError for a missing
        column, or when `fn` returns another number of rows.
        """
        part = self._part([*reads, *([keep_together] if keep_together else [])])
        # The function goes to the rows, not the rows to the function.
        if (owner := owner_of(list(part.table.columns.values()))) is not None:
            together = None if keep_together is None else list(self.view(keep_together).tolist())
            return self._of(owner.map_rows(fn, part, together)._source)
        return self._of(map_rows(fn, part).table)

    def _part(self, names: Sequence[str]) -> Self:
        part = self.table.with_columns({name: self.table.column(name) for name in names})
        part.kept = None
        return self._of(part)

    def masked_moments(self, column: str, mask: str, *, per_episode: bool = False) -> Moments:
        """Return count, mean and variance of a tensor column's entries where the column `mask` is not zero.

        `per_episode`: of an episode with several branches only the first counts (`rlcore.ops.episodes`).
        They are computed in the processes that hold the rows. Raises DataError unless both are tensor columns of the
        same shape (for ragged columns, of equal row lengths).
        """
        for name in (column, mask):
            self.table.column(name, TENSOR)
        part = self._part(list(dict.fromkeys([column, mask])))
        if per_episode and "episode" in self:
            part = part[one_row_each(episodes(self))[0]]
        count = partial(part_moments, column=column, mask=mask)
        owner = owner_of(list(part.table.columns.values()))
        return combine_moments([count(part)] if owner is None else owner.reduce_rows(count, part))

    # -- conversion

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch into the new folder `filepath`: tensors as safetensors, the rest as JSON.

        Raises DataError when the folder exists, and for a value that JSON cannot hold, naming its column and row or
        its key in meta_info.
        """
        save_table(self.table, Path(filepath))

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> Self:
        """Return the batch that `save_to_disk` wrote; DataError when the folder does not hold one."""
        return cls._of(load_table(Path(filepath)))

    def to_tensordict(self) -> Any:
        """Return a `tensordict.TensorDict` of batch size [rows].

        A ragged column becomes a jagged nested tensor, an object column a NonTensorStack, an entry of meta_info a
        NonTensorData. Raises DataError when a column and an entry of meta_info share a name.
        """
        return table_to_tensordict(self.table)

    @classmethod
    def from_tensordict(cls, tensor_dict: Any, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return the batch of a TensorDict: the inverse of `to_tensordict`, with `meta_info` added."""
        return cls._of(table_from_tensordict(tensor_dict, meta_info or {}))


def map_rows(fn: Callable[[DataProto], Mapping[str, Any] | DataProto], batch: DataProto) -> DataProto:
    """Return the result of `fn` as a batch; DataError when it has another number of rows."""
    returned = fn(batch)
    result = returned if isinstance(returned, DataProto) else DataProto.from_single_dict(returned)
    if (result.table.columns or len(result)) and len(result) != len(batch):
        name = getattr(getattr(fn, "func", fn), "__name__", fn)
        raise DataError(f"map: {name} returned {len(result)} rows for {len(batch)}; it must return one row per row")
    table = result.table.immutable()
    table.bare_rows = len(batch)
    return DataProto._of(table)


def _unpickle(
    cls: type[DataProto],
    names: list[str],
    small: EncodedColumns,
    others: dict[str, Column],
    meta_info: dict[str, Any],
    rows: int,
) -> DataProto:
    columns = others | decode_columns(small)
    return cls._of(Table({name: columns[name] for name in names}, meta_info, bare_rows=rows))
