"""Columns in Ray's object store: what a worker returns stays on its node, and references to it travel.

A worker gives each larger column as objects of their own, a run of rows each, and then the rest of its result in one
reply. All of them are return values of the call: Ray makes the caller their owner, so they outlive the process that
made them, and frees each as soon as no batch refers to it. Ray calls this `num_returns="dynamic"` and advises against
it in favour of streaming, whose references exist only once the values do; here they are passed on before.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch import Tensor

from rlcore.errors import DataError, RLCoreError, WorkerError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import Column
from rlcore.protocol.remote import Block, Layout, RemoteColumn
from rlcore.protocol.table import Table

if TYPE_CHECKING:
    from rlcore.workers.group import Pending

INLINE_BYTES = 100_000
"""Columns of a result up to this size travel in the reply of the call: a small object of its own costs more."""
BLOCKS = 32
"""Most blocks that one rank's rows of a column are cut into: what a consumer of few rows fetches in vain is small."""
LEAST_BLOCK_BYTES = 256_000
"""Least size of such a block; one below 100 kB Ray would send to the controller."""


class Reply:
    """What one rank returns, or will return: its result, and references to the larger columns of it.

    `pending` is the call under way, on the controller alone; elsewhere Ray is asked.
    """

    def __init__(self, ref: Any, made_by: str, pending: Pending | None = None, rank: int = 0) -> None:
        self._ref, self.made_by = ref, made_by
        self._pending, self._rank = pending, rank
        self._value: Any = None
        self._loaded = False

    @property
    def is_here(self) -> bool:
        """Whether the result has been received."""
        return self._loaded or (self._pending is not None and self._pending.succeeded)

    @property
    def is_made(self) -> bool:
        """Whether the call has ended; away from the controller, whether its result has been received."""
        return self.is_here or (self._pending is not None and (self._pending.was_read or self._pending.done()))

    def get(self) -> Any:
        """Wait and return the result; raises what the call raised, or WorkerError when it is lost."""
        if self._pending is not None:
            return self._pending.get()[self._rank]
        Reply.load([self])
        return self._value

    @staticmethod
    def load(replies: Sequence[Reply]) -> None:
        """Wait for several results together."""
        if replies and replies[0]._pending is not None:
            for pending in {id(reply._pending): reply._pending for reply in replies}.values():
                assert pending is not None
                pending.get()
            return
        waiting = [reply for reply in replies if not reply._loaded]
        if waiting:
            try:
                values = received(ray.get([reply._ref for reply in waiting]))
            except RayError as error:
                raise _not_made(error, waiting) from None
            for reply, value in zip(waiting, values, strict=True):
                reply._value, reply._loaded = value, True

    def __reduce__(self) -> tuple[Any, ...]:
        return Reply, (self._ref, self.made_by)


def received(returned: Sequence[Any]) -> list[Any]:
    """Return the results that several calls gave, from what Ray holds for their references."""
    refs = [list(generator) for generator in returned]
    results = ray.get([of_call[-1] for of_call in refs])
    for result, of_call in zip(results, refs, strict=True):
        for column in result.table.columns.values() if isinstance(result, DataProto) else ():
            for block in column.blocks if isinstance(column, RemoteColumn) else ():
                if isinstance(block, RayBlock):
                    block.bind(of_call)
    return results


def _not_made(error: RayError, waiting: Sequence[Reply]) -> RLCoreError:
    """Return what a consumer raises when a producer's call failed: its own error, or who died before making what."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RLCoreError):
        return cause
    makers = ", ".join(dict.fromkeys(reply.made_by for reply in waiting))
    if isinstance(cause, RayActorError):
        return WorkerError(f"what {makers} was to make is lost: a process of it died before it had made it")
    return WorkerError(f"what {makers} made is lost: {type(cause).__name__}: {cause}")


class Promise(Block):
    """The rows of the column `name` that a call under way will return."""

    is_promise = True

    def __init__(self, reply: Reply, name: str) -> None:
        self._reply, self._name = reply, name

    @property
    def is_here(self) -> bool:
        """Whether the call's reply has been received."""
        return self._reply.is_here

    @property
    def is_made(self) -> bool:
        """Whether the call has ended, as far as this process can know."""
        return self._reply.is_made

    def load(self, others: Sequence[Block]) -> None:
        """Wait for all replies together."""
        Reply.load([self._reply, *(other._reply for other in others if isinstance(other, Promise))])

    def column(self) -> Column:
        """Return the column of the reply."""
        column = self._reply.get().table.column(self._name)
        if isinstance(column, RemoteColumn) and self.count_in is not None:
            for block in column.blocks:
                block.count_in = self.count_in
        assert isinstance(column, Column)
        return column

    def __reduce__(self) -> tuple[Any, ...]:
        return Promise, (self._reply, self._name)


class RayBlock(Block):
    """Rows of the column `name` as an object of Ray's store, `nbytes` long. Fetched once in a process.

    It begins as the number of a return value of its call, and is bound to its reference by whoever receives the reply.
    """

    def __init__(self, ref: Any, name: str, nbytes: int) -> None:
        self._ref, self._name, self.nbytes = ref, name, nbytes
        self._column: Column | None = None

    def bind(self, refs: Sequence[Any]) -> None:
        """Take the reference from those of the call's return values."""
        if isinstance(self._ref, int):
            self._ref = refs[self._ref]

    @property
    def is_here(self) -> bool:
        """Whether the rows were fetched."""
        return self._column is not None

    def load(self, others: Sequence[Block]) -> None:
        """Fetch the rows of all together; WorkerError when any are gone."""
        away = [block for block in (self, *others) if isinstance(block, RayBlock) and block._column is None]
        try:
            columns = ray.get([block._ref for block in away])
        except RayError as error:
            raise WorkerError(
                f"column {self._name!r} ({sum(block.nbytes for block in away)} bytes in {len(away)} objects) is lost: "
                f"{type(error).__name__}: {error}. The node that held it has ended, or its object store lost it."
            ) from error
        for block, column in zip(away, columns, strict=True):
            block._column = column
            if block.count_in is not None:
                block.count_in[block._name] += block.nbytes

    def column(self) -> Column:
        """Return the rows."""
        if self._column is None:
            self.load([])
        assert self._column is not None
        return self._column

    def __reduce__(self) -> tuple[Any, ...]:
        return RayBlock, (self._ref, self._name, self.nbytes)


def kept_here(result: Any, inline_bytes: int) -> Generator[Any, None, None]:
    """Yield each block of a result's larger columns and then the result, with the blocks' numbers in their place."""
    if not isinstance(result, DataProto):
        yield result
        return
    kept = Table(meta_info=result.meta_info)
    number = itertools.count()
    for name, column in result.table.columns.items():
        if isinstance(column, RemoteColumn):
            kept.columns[name] = column
            continue
        device = column.form().device
        if device == "meta":
            raise DataError(f"column {name!r} is on the device 'meta', which holds no values that could travel")
        if device != "cpu":
            column = column.to("cpu")
        sizes = _bytes_of_rows(column)
        total = int(sizes.sum())
        if total > inline_bytes:
            blocks: list[Block] = []
            ends = _ends(sizes, total)
            for start, end in itertools.pairwise([0, *ends]):
                part = column.take(slice(start, end))
                blocks.append(RayBlock(next(number), name, int(sizes[start:end].sum())))
                yield part
            counts = np.diff([0, *ends])
            column = RemoteColumn(column.form(), blocks, _layout(counts))
        kept.columns[name] = column
    yield DataProto._of(kept)


def _layout(counts: np.ndarray) -> Layout:
    rows = torch.cat([torch.arange(int(count)) for count in counts])
    return Layout(torch.arange(len(counts)).repeat_interleave(torch.as_tensor(counts)), rows)


def _ends(sizes: np.ndarray, total: int) -> list[int]:
    """Return where each block's rows end: blocks of about equal bytes, as many as BLOCKS and their least size allow."""
    wanted = max(1, min(BLOCKS, total // LEAST_BLOCK_BYTES, len(sizes)))
    marks = np.arange(1, wanted) * (total / wanted)
    inner = np.searchsorted(np.cumsum(sizes), marks, side="left") + 1
    return [*sorted({int(end) for end in inner if end < len(sizes)}), len(sizes)]


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
