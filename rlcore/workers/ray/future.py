"""One call that runs on the ranks of a group on Ray: its results, and the failures that can keep it from ending."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from rlcore.protocol import DataProto
from rlcore.protocol.remote import RemoteColumn, RowMap
from rlcore.protocol.table import Table
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.future import Future
from rlcore.workers.ray.results import PendingBlock, RankResult, load_results

if TYPE_CHECKING:
    from rlcore.workers.ray.processes import RayProcesses

POLL_SECONDS = 2.0
"""While a call is awaited: seconds between checks of processes that it does not wait for directly."""


class RayFuture(Future):
    """A method call on Ray; `refs` maps the reference of each reply to its rank.

    `columns` maps a reply's reference to the references of its columns that may be large, by name, for replies of
    WorkerHost.run_declared; to None for replies of WorkerHost.run. Without `columns`, replies are plain values.
    `is_async`: the method is `async def`, so the call keeps no other from running.
    """

    def __init__(
        self,
        processes: RayProcesses,
        role: str,
        method: str,
        refs: Mapping[Any, int],
        columns: Mapping[Any, Mapping[str, Any] | None] | None = None,
        *,
        is_async: bool = False,
    ) -> None:
        super().__init__()
        self._processes = processes
        self._role = role
        self._method = method
        self._refs = dict(refs)
        self._columns = columns
        self.is_async = is_async
        # Weak references: a batch that nobody keeps must not keep its columns.
        self._pending_blocks: list[tuple[int, weakref.ref[PendingBlock]]] = []
        self._succeeded_refs: set[Any] = set()

    def done(self) -> bool:
        """Whether every rank has finished."""
        return (
            self.is_settled
            or not self._processes.session.is_current
            or not ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)[1]
        )

    def declared_batches(self, declared: Sequence[DeclaredResult | None]) -> list[DataProto | None] | None:
        """See Future; None if the declared result of a called rank is unknown."""
        batches: list[DataProto | None] = [None] * self._processes.world_size
        results = [(ref, rank, declared[rank]) for ref, rank in self._refs.items()]
        if any(result is None for _, _, result in results):
            return None
        for ref, rank, result in results:
            assert result is not None
            batches[rank] = self._declared_batch(ref, rank, result)
        return batches

    def _declared_batch(self, ref: Any, rank: int, declared: DeclaredResult) -> DataProto:
        large = (self._columns or {})[ref]
        column_refs = large or {}
        numbers = {name: number for number, name in enumerate(column_refs)}
        result = RankResult(ref, f"{self._method}() of {self._role} rank {rank}", large is not None, self, rank)
        row_map = RowMap.of_block(declared.rows)
        table = Table(bare_rows=declared.rows)
        for name, spec in declared.columns.items():
            block = PendingBlock(result, name, numbers.get(name, 0), column_refs.get(name))
            self._pending_blocks.append((rank, weakref.ref(block)))
            table.columns[name] = RemoteColumn(spec, [block], row_map)
        return DataProto._of(table)

    def wait(self) -> list[Any]:
        """Return the results by rank, or raise the first failure, even if other ranks never finish.

        After `declared_batches`, gives each PendingBlock its column, and returns None for every rank: the future does
        not keep the results.
        """
        outputs = self._wait_for_ranks()
        if self._pending_blocks:
            for rank, known in self._pending_blocks:
                if (block := known()) is not None:
                    block.keep(outputs[rank])
            # Drop the references too, or Ray would keep the replies of columns that nobody needs.
            self._pending_blocks.clear()
            self._refs.clear()
            self._columns = None
            return [None] * len(outputs)
        return outputs

    def refs_of(self, rank: int) -> list[Any]:
        """Return the reference of a rank's reply; none if the rank was not called."""
        return [ref for ref, called in self._refs.items() if called == rank]

    def has_failed(self) -> bool:
        """Whether a rank has raised already. Never waits."""
        if self.is_settled:
            return False
        ready, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)
        for ref in ready:
            if ref not in self._succeeded_refs:
                try:
                    self._values([ref])
                except Exception:  # raised later, by the caller that waits for this call
                    return True
                self._succeeded_refs.add(ref)
        return False

    def check_progress(self, running: Sequence[Any] | None = None) -> None:
        """Raise WorkerError if the call hangs. `running`: references of the replies that are not there yet."""
        if running is None:
            _, running = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)
        ranks = sorted(self._refs[ref] for ref in running)
        ended = sorted(rank for rank in self._refs.values() if rank not in ranks)
        self._processes.check_progress(self._role, self._method, ranks, ended)

    def _wait_for_ranks(self) -> list[Any]:
        """Return the results by rank, or raise the first failure."""
        self._processes.check_session()
        outputs: list[Any] = [None] * self._processes.world_size
        waiting = dict(self._refs)
        pings: dict[Any, tuple[RayProcesses, int]] = {}
        while waiting:
            # Waits for all ranks together and looks for failures only when nothing came: most calls need no ping.
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS, fetch_local=False)
            if not ready:
                self._look_for_failures(waiting, pings)
            self._receive(ready, waiting, outputs)
            for ref in ray.wait(list(pings), num_returns=len(pings), timeout=0)[0] if pings else ():
                self._check_ping(ref, *pings.pop(ref), waiting)
        return outputs

    def _look_for_failures(self, waiting: Mapping[Any, int], pings: dict[Any, tuple[RayProcesses, int]]) -> None:
        """Raise a failure elsewhere that may keep this call from ending, and ping all processes not pinged yet.

        A rank may hang because another process died: a rank of its own group, a producer of its inputs, or a process
        with an earlier turn on its place. Or an earlier, still unread call failed on one rank and blocks the others.
        """
        self._processes.check()
        self.check_progress(list(waiting))
        for processes in self._processes.all_started():
            for earlier in processes.running():
                if earlier is not self and not earlier.is_async and earlier.has_failed():
                    earlier.outputs()
                elif earlier is not self:
                    earlier.check_progress()
        watched = {*pings.values(), *((self._processes, rank) for rank in waiting.values())}
        for processes in self._processes.all_started():
            new = processes.ping(but=[rank for owner, rank in watched if owner is processes])
            pings |= {ref: (processes, rank) for ref, rank in new.items()}

    def _receive(self, ready: Sequence[Any], waiting: dict[Any, int], outputs: list[Any]) -> None:
        """Move ready results from `waiting` to `outputs`, or raise the failure of one of them."""
        try:
            for ref, value in zip(ready, self._values(ready), strict=True):
                outputs[waiting[ref]] = value
        except Exception:
            # Read them one by one: the first failure is raised with the name of its rank.
            for ref in ready:
                self._read(ref, waiting.pop(ref), waiting)
            raise
        for ref in ready:
            del waiting[ref]

    def _values(self, refs: Sequence[Any]) -> list[Any]:
        values = ray.get(list(refs))
        if self._columns is None:
            return values
        columns = [self._columns[ref] for ref in refs]
        return load_results(values, [None if known is None else list(known.values()) for known in columns])

    def _read(self, ref: Any, rank: int, waiting: Mapping[Any, int]) -> None:
        try:
            self._values([ref]) if ref in self._refs else ray.get(ref)
        except Exception as error:
            where = self._role, f"{self._method}()"
            raise self._processes.failure(error, rank, *where, waiting, blocks=not self.is_async) from None

    def _check_ping(self, ref: Any, processes: RayProcesses, rank: int, waiting: Mapping[Any, int]) -> None:
        if processes is self._processes:
            self._read(ref, rank, waiting)
            return
        try:
            ray.get(ref)
        except RayActorError as error:
            if processes.is_usable:  # else its death has been reported already
                call = f"{self._role}.{self._method}()"
                raise processes.failure(error, rank, processes.name, call, {}) from None
