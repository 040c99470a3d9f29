"""Results of calls on Ray: the reply of one rank, and the blocks that stand for its columns until it arrives."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlcore.errors import RLCoreError, WorkerError
from rlcore.protocol import DataProto
from rlcore.protocol.columns import Column
from rlcore.protocol.remote import Block, RemoteColumn
from rlcore.workers.ray.store import bind_refs

if TYPE_CHECKING:
    from rlcore.workers.future import Future


class RankResult:
    """The result of one rank, perhaps still to come, and the reference of its reply.

    `made_by` names the rank and method in messages. `counted`: the call returns one value per column that may be
    large, and the PendingBlocks hold their references. `future` is set on the controller only; other processes ask Ray.
    """

    def __init__(self, ref: Any, made_by: str, counted: bool, future: Future | None = None, rank: int = 0) -> None:
        self._ref, self.made_by, self.counted = ref, made_by, counted
        self._future, self._rank = future, rank
        self._value: Any = None
        self._loaded = False

    @property
    def is_local(self) -> bool:
        """Whether the result has arrived in this process."""
        return self._loaded or (self._future is not None and self._future.succeeded)

    @property
    def is_ready(self) -> bool:
        """Whether the call has ended; away from the controller, whether the result has arrived."""
        return self.is_local or (self._future is not None and (self._future.was_read or self._future.done()))

    def get(self) -> Any:
        """Wait and return the result; raises the call's error, or WorkerError when the result is lost."""
        if self._future is not None:
            return self._future.outputs()[self._rank]
        RankResult.load([self])
        return self._value

    def release(self) -> None:
        """Drop the reference to the reply; columns that are still needed have references of their own."""
        self._ref = None

    @staticmethod
    def load(results: Sequence[RankResult]) -> None:
        """Wait for several results together."""
        if results and results[0]._future is not None:
            for future in {id(result._future): result._future for result in results}.values():
                assert future is not None
                future.outputs()
            return
        waiting = [result for result in results if not result._loaded]
        if not waiting:
            return
        try:
            values = ray.get([result._ref for result in waiting])
            values = load_results(values, [() if result.counted else None for result in waiting])
        except RayError as error:
            raise _producer_error(error, waiting) from None
        for result, value in zip(waiting, values, strict=True):
            result._value, result._loaded = value, True

    def __reduce__(self) -> tuple[Any, ...]:
        return RankResult, (self._ref, self.made_by, self.counted)


def load_results(replies: Sequence[Any], columns: Sequence[Sequence[Any] | None]) -> list[Any]:
    """Return the results of several calls from their replies, with references bound into their large columns.

    `columns[i]` holds the references of call i's columns that are known here. It is None for a call whose reply is the
    list of its references; the last of them is then the result.
    """
    refs = [list(reply) if known is None else known for reply, known in zip(replies, columns, strict=True)]
    unknown = [call for call, known in enumerate(columns) if known is None]
    results = list(replies)
    for call, result in zip(unknown, ray.get([refs[call][-1] for call in unknown]), strict=True):
        results[call] = result
    for call, known in enumerate(columns):
        if known is not None and isinstance(results[call], bytes):
            results[call] = pickle.loads(results[call])
        if refs[call] and isinstance(results[call], DataProto):
            for column in results[call].table.columns.values():
                bind_refs(column, refs[call])
    return results


def _producer_error(error: RayError, waiting: Sequence[RankResult]) -> RLCoreError:
    """Return the error that a consumer raises for a failed producer: the producer's own, or a WorkerError naming it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RLCoreError):
        return cause
    producers = ", ".join(dict.fromkeys(result.made_by for result in waiting))
    if isinstance(cause, RayActorError):
        return WorkerError(f"the result of {producers} is lost: its process died before it was computed")
    return WorkerError(f"the result of {producers} is lost: {type(cause).__name__}: {cause}")


class PendingBlock(Block):
    """The rows of the column `name` that a running call will return.

    `ref` is value number `number` of those that the call returns after its reply, if that is known before the call.
    """

    must_resolve = True

    def __init__(self, result: RankResult, name: str, number: int = 0, ref: Any = None) -> None:
        self._result, self._name = result, name
        self._number, self._ref = number, ref
        self._column: Column | None = None

    def keep(self, result: DataProto) -> None:
        """Take the column out of the call's result, so that this block does not keep the other columns alive."""
        # The worker put numbers of return values in place of references, which it does not have.
        self._column = result.table.column(self._name)
        bind_refs(self._column, {self._number: self._ref}, self._result.made_by)
        self._ref = None
        self._result.release()

    @property
    def is_local(self) -> bool:
        """Whether the call's reply has arrived."""
        return self._column is not None or self._result.is_local

    @property
    def is_ready(self) -> bool:
        """Whether the call has ended, as far as this process knows."""
        return self._result.is_ready

    def load(self, others: Sequence[Block]) -> None:
        """Wait for all replies together."""
        RankResult.load([self._result, *(other._result for other in others if isinstance(other, PendingBlock))])

    def column(self) -> Column:
        """Return the column of the call's result."""
        if self._column is None:
            result = self._result.get()
            if self._column is None:  # on the controller, `get` has called `keep`
                self.keep(result)
        column = self._column
        if isinstance(column, RemoteColumn) and self.fetch_counter is not None:
            for block in column.blocks:
                block.fetch_counter = self.fetch_counter
        assert isinstance(column, Column)
        return column

    def __reduce__(self) -> tuple[Any, ...]:
        return PendingBlock, (self._result, self._name, self._number, self._ref)
