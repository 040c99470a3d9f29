"""Columns in Ray's object store: what a worker returns stays on its node, and references to it travel.

A worker gives each larger column as objects of its own, and the rest of its result in one reply. All of them are
return values of the call: Ray makes the caller their owner, so they outlive the process that made them, and frees each
as soon as no batch refers to it. On one node a column is one object, and what a call has promised tells their number;
otherwise only the worker knows it. Ray calls that `num_returns="dynamic"` and advises against it in favour of
streaming, whose references exist only once the values do; here they are passed on before.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch import Tensor

from rlcore.errors import DataError, RLCoreError, WorkerError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import Column, DenseColumn, RaggedColumn
from rlcore.protocol.remote import Block, RemoteColumn, RowMap
from rlcore.protocol.table import Table

if TYPE_CHECKING:
    from rlcore.workers.group import PendingCall

INLINE_BYTES = 100_000
"""Columns of a result up to this size travel in the reply of the call: a small object of its own costs more."""
BLOCKS = 32
"""Most blocks that one rank's rows of a column are cut into: what a consumer of few rows fetches in vain is small."""
LEAST_BLOCK_BYTES = 400_000
"""Least size of such a block, as each costs about as much time as 400 kB; one below 100 kB goes to the controller."""


class RankResult:
    """What one rank returns, or will return: its result, and references to the larger columns of it.

    `pending` is the call under way, on the controller alone; elsewhere Ray is asked. `counted`: the call returns a
    value for each column that may be large, and the promises of these know them.
    """

    def __init__(
        self, ref: Any, made_by: str, counted: bool, pending: PendingCall | None = None, rank: int = 0
    ) -> None:
        self._ref, self.made_by, self.counted = ref, made_by, counted
        self._pending, self._rank = pending, rank
        self._value: Any = None
        self._loaded = False

    @property
    def is_local(self) -> bool:
        """Whether the result has been received."""
        return self._loaded or (self._pending is not None and self._pending.succeeded)

    @property
    def is_ready(self) -> bool:
        """Whether the call has ended; away from the controller, whether its result has been received."""
        return self.is_local or (self._pending is not None and (self._pending.was_read or self._pending.done()))

    def get(self) -> Any:
        """Wait and return the result; raises what the call raised, or WorkerError when it is lost."""
        if self._pending is not None:
            return self._pending.get()[self._rank]
        RankResult.load([self])
        return self._value

    def forget(self) -> None:
        """Let go of the reference to all that the call returned; those who need a part of it have theirs."""
        self._ref = None

    @staticmethod
    def load(replies: Sequence[RankResult]) -> None:
        """Wait for several results together."""
        if replies and replies[0]._pending is not None:
            for pending in {id(reply._pending): reply._pending for reply in replies}.values():
                assert pending is not None
                pending.get()
            return
        waiting = [reply for reply in replies if not reply._loaded]
        if waiting:
            try:
                values = ray.get([reply._ref for reply in waiting])
                values = load_results(values, [() if reply.counted else None for reply in waiting])
            except RayError as error:
                raise _not_made(error, waiting) from None
            for reply, value in zip(waiting, values, strict=True):
                reply._value, reply._loaded = value, True

    def __reduce__(self) -> tuple[Any, ...]:
        return RankResult, (self._ref, self.made_by, self.counted)


def load_results(returned: Sequence[Any], columns: Sequence[Sequence[Any] | None]) -> list[Any]:
    """Return the results that several calls gave, from what Ray holds for their references.

    `columns` are the references of each call's columns, as far as they are known here; None where the first value that
    a call returned says which they are.
    """
    refs = [list(value) if known is None else known for value, known in zip(returned, columns, strict=True)]
    counted = [known is not None for known in columns]
    last = iter(ray.get([of_call[-1] for of_call, known in zip(refs, counted, strict=True) if not known]))
    results = [_whole(value) if known else next(last) for value, known in zip(returned, counted, strict=True)]
    for result, of_call in zip(results, refs, strict=True):
        for column in result.table.columns.values() if of_call and isinstance(result, DataProto) else ():
            _bind(column, of_call)
    return results


def _whole(reply: Any) -> Any:
    return pickle.loads(reply) if isinstance(reply, bytes) else reply


def _bind(column: Column, refs: Mapping[int, Any] | Sequence[Any], made_by: str = "") -> None:
    for block in column.blocks if isinstance(column, RemoteColumn) else ():
        if isinstance(block, RayBlock):
            block.kept.bind(refs)
            block.kept.made_by = block.kept.made_by or made_by


def _not_made(error: RayError, waiting: Sequence[RankResult]) -> RLCoreError:
    """Return what a consumer raises when a producer's call failed: its own error, or who died before making what."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RLCoreError):
        return cause
    makers = ", ".join(dict.fromkeys(reply.made_by for reply in waiting))
    if isinstance(cause, RayActorError):
        return WorkerError(f"what {makers} was to make is lost: a process of it died before it had made it")
    return WorkerError(f"what {makers} made is lost: {type(cause).__name__}: {cause}")


class PendingBlock(Block):
    """The rows of the column `name` that a call under way will return.

    `ref` is value number `number` of those that the call returns beside its reply, where that is known beforehand.
    """

    must_resolve = True

    def __init__(self, reply: RankResult, name: str, number: int = 0, ref: Any = None) -> None:
        self._reply, self._name = reply, name
        self._number, self._ref = number, ref
        self._column: Column | None = None

    def keep(self, result: DataProto) -> None:
        """Take the column out of the call's result, so that the rest of it need not stay for this one's sake."""
        self._column = result.table.column(self._name)
        _bind(self._column, {self._number: self._ref}, self._reply.made_by)
        self._ref = None
        self._reply.forget()

    @property
    def is_local(self) -> bool:
        """Whether the call's reply has been received."""
        return self._column is not None or self._reply.is_local

    @property
    def is_ready(self) -> bool:
        """Whether the call has ended, as far as this process can know."""
        return self._reply.is_ready

    def load(self, others: Sequence[Block]) -> None:
        """Wait for all replies together."""
        RankResult.load([self._reply, *(other._reply for other in others if isinstance(other, PendingBlock))])

    def column(self) -> Column:
        """Return the column of the reply."""
        if self._column is None:
            result = self._reply.get()
            if self._column is None:
                self.keep(result)
        column = self._column
        if isinstance(column, RemoteColumn) and self.fetch_counter is not None:
            for block in column.blocks:
                block.fetch_counter = self.fetch_counter
        assert isinstance(column, Column)
        return column

    def __reduce__(self) -> tuple[Any, ...]:
        return PendingBlock, (self._reply, self._name, self._number, self._ref)


class RayObject:
    """Rows of the column `name` as an object of Ray's store. Fetched once in a process; on its own machine, not copied.

    It begins as the number of a return value of its call, and is bound to its reference by whoever receives the reply.
    """

    def __init__(self, ref: Any, name: str, made_by: str = "") -> None:
        self.ref, self.name, self.made_by = ref, name, made_by
        self.column: Column | None = None

    def bind(self, refs: Mapping[int, Any] | Sequence[Any]) -> None:
        """Take the reference from those of the call's return values, by their numbers."""
        if isinstance(self.ref, int):
            self.ref = refs[self.ref]

    def __reduce__(self) -> tuple[Any, ...]:
        return RayObject, (self.ref, self.name, self.made_by)


class RayBlock(Block):
    """The rows of an object, `nbytes` long: all of them, or with `rows` those of an object that is mapped, not sent."""

    def __init__(self, kept: RayObject, nbytes: int, rows: slice | None = None) -> None:
        self.kept, self.nbytes, self._rows = kept, nbytes, rows
        self._column: Column | None = None

    @property
    def is_local(self) -> bool:
        """Whether the rows were fetched."""
        return self._column is not None

    @property
    def is_mapped(self) -> bool:
        """Whether its rows are read where they are, on the one node that there is."""
        return self._rows is not None

    def part(self, start: int, end: int) -> Block:
        """Return the block of these rows; its bytes are its share of the rows'."""
        if self._rows is None:
            return self
        first, rows = self._rows.start, self._rows.stop - self._rows.start
        nbytes = self.nbytes * (end - start) // max(1, rows)
        part = RayBlock(self.kept, nbytes, slice(first + start, first + end))
        part.fetch_counter = self.fetch_counter
        return part

    def same_as(self, other: Block) -> bool:
        """Whether the other is known to be the same rows of the same object."""
        return isinstance(other, RayBlock) and self.kept is other.kept and self._rows == other._rows

    def load(self, others: Sequence[Block]) -> None:
        """Fetch the rows of all together; WorkerError when any are gone."""
        blocks = [block for block in (self, *others) if isinstance(block, RayBlock) and block._column is None]
        away = list({id(block.kept): block.kept for block in blocks if block.kept.column is None}.values())
        try:
            for kept, column in zip(away, ray.get([kept.ref for kept in away]), strict=True):
                kept.column = column
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            made_by = f" that {self.kept.made_by} made" if self.kept.made_by else ""
            raise WorkerError(
                f"column {self.kept.name!r}{made_by} ({sum(block.nbytes for block in blocks)} bytes in {len(away)} "
                f"objects) is lost: {type(cause).__name__}: {cause}. The node that held it has ended, or its object "
                "store lost it or had no room for it."
            ) from error
        fetched = {id(kept) for kept in away}
        for block in blocks:
            assert block.kept.column is not None
            block._column = block.kept.column if block._rows is None else block.kept.column.take(block._rows)
            if block.fetch_counter is not None and id(block.kept) in fetched:
                block.fetch_counter[block.kept.name] += block.nbytes

    def column(self) -> Column:
        """Return the rows."""
        if self._column is None:
            self.load([])
        assert self._column is not None
        return self._column

    def __reduce__(self) -> tuple[Any, ...]:
        return RayBlock, (self.kept, self.nbytes, self._rows)


def store_result(result: Any, inline_bytes: int, one_node: bool) -> Generator[Any, None, None]:
    """Yield the objects of a result's larger columns and then the result, with the objects' numbers in their place.

    Each block is an object of its own, so that another node fetches it alone. Where there is but one node, a column is
    one object, as each takes a millisecond: who reads it maps it, and what is not touched is not brought.
    """
    if not isinstance(result, DataProto):
        yield result
        return
    kept, large = _split(result, inline_bytes)
    number = itertools.count()
    cuts = _Cuts(sum(large.values(), np.zeros(len(result), dtype=np.int64)))
    for name, sizes in large.items():
        column = kept.columns[name]
        if one_node:
            kept.columns[name] = _mapped(name, column, next(number), sizes)
            yield column
            continue
        ends, row_map = cuts.of(int(sizes.sum()))
        blocks: list[Block] = []
        for start, end in itertools.pairwise([0, *ends]):
            blocks.append(RayBlock(RayObject(next(number), name), int(sizes[start:end].sum())))
            yield column.take(slice(start, end))
        kept.columns[name] = RemoteColumn(column.spec(), blocks, row_map)
    yield DataProto._of(kept)


def store_declared_result(result: DataProto, inline_bytes: int, names: Iterable[str]) -> list[Any]:
    """Return the result, then for each of these columns its object if it is large; for where there is one node.

    What is not large has no bytes for an object, and a result that is known to hold no reference is bytes, too: both
    cost Ray a tenth of what anything else does.
    """
    kept, large = _split(result, inline_bytes)
    reply: Any = DataProto._of(kept)
    plain = all(isinstance(column, (DenseColumn, RaggedColumn)) for column in kept.columns.values())
    objects: list[Any] = []
    for number, name in enumerate(names):
        objects.append(kept.columns[name] if name in large else b"")
        if name in large:
            kept.columns[name] = _mapped(name, kept.columns[name], number, large[name])
    return [pickle.dumps(reply) if plain else reply, *objects]


def _split(result: DataProto, inline_bytes: int) -> tuple[Table, dict[str, np.ndarray]]:
    """Return the columns on the CPU, and by name those with more than `inline_bytes`: the bytes of each row."""
    kept = Table(meta_info=dict(result.meta_info))
    large: dict[str, np.ndarray] = {}
    for name, column in result.table.columns.items():
        if not isinstance(column, RemoteColumn):
            device = column.spec().device
            if device == "meta":
                raise DataError(f"column {name!r} is on the device 'meta', which holds no values that could travel")
            column = column.to("cpu") if device != "cpu" else column
            if column.kind == "object" or column.view().nbytes > inline_bytes:
                sizes = _bytes_of_rows(column)
                if int(sizes.sum()) > inline_bytes:
                    large[name] = sizes
        kept.columns[name] = column
    return kept, large


def _mapped(name: str, column: Column, number: int, sizes: np.ndarray) -> RemoteColumn:
    block = RayBlock(RayObject(number, name), int(sizes.sum()), slice(0, len(column)))
    return RemoteColumn.of_block(column.spec(), block, len(column))


class _Cuts:
    """Where the blocks of a result's columns end, in rows: blocks of about equal bytes of all columns together.

    Columns of equally many blocks are cut alike, so that they share a row_map.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        self._sums = np.cumsum(sizes)
        self._known: dict[int, tuple[list[int], RowMap]] = {}

    def of(self, total: int) -> tuple[list[int], RowMap]:
        """Return where the blocks of a column of `total` bytes end, and its row_map."""
        rows = len(self._sums)
        wanted = max(1, min(BLOCKS, total // LEAST_BLOCK_BYTES, rows))
        if wanted not in self._known:
            marks = np.arange(1, wanted) * (self._sums[-1] / wanted)
            inner = np.searchsorted(self._sums, marks, side="left") + 1
            ends = [*sorted({int(end) for end in inner if end < rows}), rows]
            counts = torch.tensor(np.diff([0, *ends]))
            first = torch.tensor([0, *ends[:-1]]).repeat_interleave(counts)
            row_map = RowMap(torch.arange(len(ends)).repeat_interleave(counts), torch.arange(rows) - first)
            self._known[wanted] = ends, row_map
        return self._known[wanted]


def _bytes_of_rows(column: Column) -> np.ndarray:
    """Return int64 [rows]: the bytes of each row; an object's are those of its pickle."""
    value = column.view()
    if isinstance(value, Ragged):
        wide = value.values[:1].nbytes if len(value.values) else 0
        return np.asarray(value.lengths.numpy()) * wide + 8
    if isinstance(value, Tensor):
        return np.full(len(value), value.nbytes // max(1, len(value)), dtype=np.int64)
    return np.array([_bytes_of_object(entry) for entry in value], dtype=np.int64)


def _bytes_of_object(entry: Any) -> int:
    if isinstance(entry, str):
        return len(entry)
    if entry is None or isinstance(entry, (bool, int, float)):
        return 8
    return len(ray.cloudpickle.dumps(entry))


def await_inputs(value: Any) -> None:
    """Wait until all that a call's arguments refer to is made; raises what kept one of them from it."""
    for batch in batches_in(value):
        for column in batch.table.columns.values():
            if isinstance(column, RemoteColumn):
                column.wait()


def batches_in(value: Any) -> Iterator[DataProto]:
    """Give every DataProto in a value, also inside lists, tuples, dicts and dataclasses."""
    if isinstance(value, DataProto):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from batches_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from batches_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from batches_in(getattr(value, field.name))
