"""Columns in Ray's object store: a result's columns stay on the node of their producer, and references to them travel.

A worker returns each larger column as objects of its own, and the rest of its result in one reply. All of them are
return values of the call. So Ray makes the caller their owner: they outlive the process that computed them, and Ray
frees each one when no batch refers to it any more. On one node a column is one object, and a declared result fixes the
number of objects. Otherwise only the worker knows the number. Ray calls that `num_returns="dynamic"`, and recommends
streaming instead. But a streamed reference exists only once its value does, and rlcore passes references on earlier.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from rlcore.errors import DataError, WorkerError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import Column, DenseColumn, RaggedColumn
from rlcore.protocol.remote import Block, RemoteColumn, RowMap
from rlcore.protocol.table import Table

INLINE_BYTES = 100_000
"""Columns of a result up to this size travel in the call's reply: a small object of its own would cost more."""
MAX_BLOCKS = 32
"""Blocks per column of one rank's result, at most: small enough blocks that a consumer of few rows fetches little."""
MIN_BLOCK_BYTES = 400_000
"""Smallest size of such a block. Each block costs as much time as 400 kB, and Ray sends one below 100 kB inline."""


class RayObject:
    """The column `name`, or some of its rows, as an object in Ray's store. A process fetches it once; a process on the
    object's own machine reads it without a copy.

    `ref` starts as the number of a return value of the call. The receiver of the reply replaces it by the ObjectRef.
    """

    def __init__(self, ref: Any, name: str, made_by: str = "") -> None:
        self.ref, self.name, self.made_by = ref, name, made_by
        self.column: Column | None = None

    def bind(self, refs: Mapping[int, Any] | Sequence[Any]) -> None:
        """Replace the number of a return value by its reference; `refs` maps numbers to references."""
        if isinstance(self.ref, int):
            self.ref = refs[self.ref]

    def __reduce__(self) -> tuple[Any, ...]:
        return RayObject, (self.ref, self.name, self.made_by)


def bind_refs(column: Column, refs: Mapping[int, Any] | Sequence[Any], made_by: str = "") -> None:
    """Bind the objects of a remote column to a call's references; others are unchanged. `made_by` is for messages."""
    for block in column.blocks if isinstance(column, RemoteColumn) else ():
        if isinstance(block, RayBlock):
            block.object.bind(refs)
            block.object.made_by = block.object.made_by or made_by


class RayBlock(Block):
    """The rows of an object, `nbytes` bytes. With `rows`, the object is mapped, and the block is these rows of it."""

    def __init__(self, object: RayObject, nbytes: int, rows: slice | None = None) -> None:
        self.object, self.nbytes, self._rows = object, nbytes, rows
        self._column: Column | None = None

    @property
    def is_local(self) -> bool:
        """Whether the rows have been fetched."""
        return self._column is not None

    @property
    def is_mapped(self) -> bool:
        """Whether the rows are read from shared memory, because the cluster has only one node."""
        return self._rows is not None

    def part(self, start: int, end: int) -> Block:
        """Return the block of the rows from `start` to `end`; its `nbytes` is in proportion."""
        if self._rows is None:
            return self
        first, rows = self._rows.start, self._rows.stop - self._rows.start
        nbytes = self.nbytes * (end - start) // max(1, rows)
        part = RayBlock(self.object, nbytes, slice(first + start, first + end))
        part.fetch_counter = self.fetch_counter
        return part

    def same_as(self, other: Block) -> bool:
        """Whether both blocks are the same rows of the same object."""
        return isinstance(other, RayBlock) and self.object is other.object and self._rows == other._rows

    def load(self, others: Sequence[Block]) -> None:
        """Fetch the rows of all blocks together; WorkerError when some are lost."""
        blocks = [block for block in (self, *others) if isinstance(block, RayBlock) and block._column is None]
        # Blocks of one object are fetched once.
        away = list({id(block.object): block.object for block in blocks if block.object.column is None}.values())
        if away and not ray.is_initialized():
            raise WorkerError(f"column {self.object.name!r} is lost: the Ray session that held it has ended")
        try:
            fetched = ray.get([each.ref for each in away])
        except (RayError, ValueError) as error:  # a ValueError: the reference is of an earlier Ray session
            cause = error.cause if isinstance(error, RayTaskError) else error
            source = f" from {self.object.made_by}" if self.object.made_by else ""
            raise WorkerError(
                f"column {self.object.name!r}{source} is lost ({sum(block.nbytes for block in blocks)} bytes in "
                f"{len(away)} objects): {type(cause).__name__}: {cause}. Its node or Ray session has ended, or its "
                "object store lost it or had no room for it."
            ) from error
        for each, column in zip(away, fetched, strict=True):
            each.column = column
        newly_fetched = {id(each) for each in away}
        for block in blocks:
            block._take_rows(is_new=id(block.object) in newly_fetched)

    def _take_rows(self, is_new: bool) -> None:
        """Select the block's rows from its fetched object; count its bytes if the object is new in this process."""
        column = self.object.column
        assert column is not None
        self._column = column if self._rows is None else column.take(self._rows)
        if is_new and self.fetch_counter is not None:
            self.fetch_counter[self.object.name] += self.nbytes

    def column(self) -> Column:
        """Return the rows; fetches them first if necessary."""
        if self._column is None:
            self.load([])
        assert self._column is not None
        return self._column

    def __reduce__(self) -> tuple[Any, ...]:
        return RayBlock, (self.object, self.nbytes, self._rows)


def store_result(result: Any, inline_bytes: int, one_node: bool) -> Generator[Any, None, None]:
    """Yield the objects of a result's larger columns, and then the result, with the objects' numbers in their place.

    Each block is an object of its own, so that another node can fetch it without the others. On a single node a column
    is one object, since each object costs a millisecond: readers map it, and untouched rows are never read.
    """
    if not isinstance(result, DataProto):
        yield result
        return
    table, large = _separate_large(result, inline_bytes)
    number = itertools.count()
    block_ends = _BlockEnds(sum(large.values(), np.zeros(len(result), dtype=np.int64)))
    for name, sizes in large.items():
        column = table.columns[name]
        if one_node:
            table.columns[name] = _as_one_object(name, column, next(number), sizes)
            yield column
            continue
        ends, row_map = block_ends.of(int(sizes.sum()))
        blocks: list[Block] = []
        for start, end in itertools.pairwise([0, *ends]):
            blocks.append(RayBlock(RayObject(next(number), name), int(sizes[start:end].sum())))
            yield column.take(slice(start, end))
        table.columns[name] = RemoteColumn(column.spec(), blocks, row_map)
    yield result._of(table)


def store_declared_result(result: DataProto, inline_bytes: int, names: Iterable[str]) -> list[Any]:
    """Return the result, and then one object for each of the columns `names`; for a cluster of one node.

    The object of a column that is not large is empty bytes. A result without references is pickled to bytes. Ray
    handles bytes in a tenth of the time of other values.
    """
    table, large = _separate_large(result, inline_bytes)
    reply: Any = DataProto._of(table)
    plain = all(isinstance(column, (DenseColumn, RaggedColumn)) for column in table.columns.values())
    objects: list[Any] = []
    for number, name in enumerate(names):
        # The number of return values is fixed before the call, so a small column leaves an empty one.
        objects.append(table.columns[name] if name in large else b"")
        if name in large:
            table.columns[name] = _as_one_object(name, table.columns[name], number, large[name])
    return [pickle.dumps(reply) if plain else reply, *objects]


def _separate_large(result: DataProto, inline_bytes: int) -> tuple[Table, dict[str, np.ndarray]]:
    """Return the columns, on the CPU, and for each one larger than `inline_bytes` the bytes of its rows."""
    table = result.table.with_columns({})
    large: dict[str, np.ndarray] = {}
    for name, column in result.table.columns.items():
        if not isinstance(column, RemoteColumn):
            device = column.spec().device
            if device == "meta":
                raise DataError(f"column {name!r} is on the device 'meta', which has no values to send")
            column = column.to("cpu") if device != "cpu" else column
            if column.kind == "object" or column.view().nbytes > inline_bytes:
                sizes = _bytes_of_rows(column)
                if int(sizes.sum()) > inline_bytes:
                    large[name] = sizes
        table.columns[name] = column
    return table, large


def _as_one_object(name: str, column: Column, number: int, sizes: np.ndarray) -> RemoteColumn:
    block = RayBlock(RayObject(number, name), int(sizes.sum()), slice(0, len(column)))
    return RemoteColumn.of_block(column.spec(), block, len(column))


class _BlockEnds:
    """The rows at which the blocks of a result's columns end. Blocks have about equal bytes of all columns together.

    Columns with equal numbers of blocks end them at the same rows, so that they share a row map.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        self._sums = np.cumsum(sizes)
        self._known: dict[int, tuple[list[int], RowMap]] = {}

    def of(self, total: int) -> tuple[list[int], RowMap]:
        """Return the block ends of a column of `total` bytes, and its row map."""
        rows = len(self._sums)
        wanted = max(1, min(MAX_BLOCKS, total // MIN_BLOCK_BYTES, rows))
        if wanted not in self._known:
            # Equal bytes rather than equal rows: long responses would make some blocks much larger.
            marks = np.arange(1, wanted) * (self._sums[-1] / wanted)
            inner = np.searchsorted(self._sums, marks, side="left") + 1
            ends = [*sorted({int(end) for end in inner if end < rows}), rows]
            counts = torch.tensor(np.diff([0, *ends]))
            first = torch.tensor([0, *ends[:-1]]).repeat_interleave(counts)
            row_map = RowMap(torch.arange(len(ends)).repeat_interleave(counts), torch.arange(rows) - first)
            self._known[wanted] = ends, row_map
        return self._known[wanted]


def _bytes_of_rows(column: Column) -> np.ndarray:
    """Return the bytes of each row, int64 [rows]; of an object, the bytes of its pickle."""
    value = column.view()
    if isinstance(value, Ragged):
        entry = value.values[:1].nbytes if len(value.values) else 0
        return np.asarray(value.lengths.numpy()) * entry + 8
    if isinstance(value, Tensor):
        return np.full(len(value), value.nbytes // max(1, len(value)), dtype=np.int64)
    return np.array([_bytes_of_object(entry) for entry in value], dtype=np.int64)


def _bytes_of_object(entry: Any) -> int:
    if isinstance(entry, str):
        return len(entry)
    if entry is None or isinstance(entry, (bool, int, float)):
        return 8
    # As Ray will pickle it; there is no cheaper way to know.
    return len(ray.cloudpickle.dumps(entry))
