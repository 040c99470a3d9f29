"""One call under way on the ranks of a group on Ray: what it gives, and how long to wait for it."""

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
from rlcore.workers.group import PendingCall
from rlcore.workers.ray_store import PendingBlock, RankResult, load_results

if TYPE_CHECKING:
    from rlcore.workers.ray_group import RayProcesses

POLL_SECONDS = 2.0
"""While a call is awaited: time between looks at the processes that it does not wait for."""


class RayFuture(PendingCall):
    """One method call under way; `refs` are the results to come, with their ranks.

    `columns` are the references of each result's columns that may be large, by name, for what WorkerHost.run_declared
    gives; None for a result of WorkerHost.run. Without it they are plain results.
    """

    def __init__(
        self,
        processes: RayProcesses,
        role: str,
        method: str,
        refs: Mapping[Any, int],
        columns: Mapping[Any, Mapping[str, Any] | None] | None = None,
    ) -> None:
        super().__init__()
        self._processes = processes
        self._role = role
        self._method = method
        self._refs = dict(refs)
        self._columns = columns
        self._pending_blocks: list[tuple[int, weakref.ref[PendingBlock]]] = []
        self._fine: set[Any] = set()

    def done(self) -> bool:
        """Whether every rank has finished."""
        return (
            self.is_settled
            or not ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)[1]
        )

    def declared_batch(self, rank: int, declared: DeclaredResult) -> DataProto:
        """Return what a rank will return, by reference."""
        ref = next(ref for ref, of_rank in self._refs.items() if of_rank == rank)
        columns = (self._columns or {})[ref]
        known = columns or {}
        number_of = {name: number for number, name in enumerate(known)}
        reply = RankResult(ref, f"{self._role} rank {rank}, in {self._method}(),", columns is not None, self, rank)
        row_map = RowMap.of_block(declared.rows)
        table = Table()
        for name, form in declared.columns.items():
            promise = PendingBlock(reply, name, number_of.get(name, 0), known.get(name))
            self._pending_blocks.append((rank, weakref.ref(promise)))
            table.columns[name] = RemoteColumn(form, [promise], row_map)
        return DataProto._of(table)

    def wait(self) -> list[Any]:
        """Return the results by rank, or raise the first failure, even if other ranks never finish.

        Of a call whose result was promised each promise gets its column, and nothing else of it is held here.
        """
        outputs = self._outputs_of_ranks()
        if self._pending_blocks:
            for rank, known in self._pending_blocks:
                if (promise := known()) is not None:
                    promise.keep(outputs[rank])
            self._pending_blocks.clear()
            self._refs.clear()
            self._columns = None
            return [None] * len(outputs)
        return outputs

    def has_failed(self) -> bool:
        """Whether a rank has raised already; waits for nothing."""
        if self.is_settled:
            return False
        ready, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)
        for ref in ready:
            if ref not in self._fine:
                try:
                    self._values([ref])
                except Exception:  # raised by whoever waits for this call
                    return True
                self._fine.add(ref)
        return False

    def _outputs_of_ranks(self) -> list[Any]:
        """Return the results by rank, or raise the first failure.

        Processes that this call does not wait for are pinged, as it may hang because one of them died: a rank of its
        own group, or of another that is to make its inputs or has the turn before it. Or because an earlier call, which
        nobody waits for yet, failed on one rank and holds up the others.
        """
        processes = self._processes
        outputs: list[Any] = [None] * processes.world_size
        waiting = dict(self._refs)
        pings: dict[Any, tuple[RayProcesses, int]] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS, fetch_local=False)
            if not ready:
                processes.check()
                for others in processes.all_started():
                    for earlier in others.under_way():
                        if earlier is not self and earlier.has_failed():
                            earlier.get()
                asked = {*pings.values(), *((processes, rank) for rank in waiting.values())}
                for others in processes.all_started():
                    fresh = others.ping(rank for asker, rank in asked if asker is others)
                    pings |= {ref: (others, rank) for ref, rank in fresh.items()}
            try:
                for ref, value in zip(ready, self._values(ready), strict=True):
                    outputs[waiting[ref]] = value
                waiting = {ref: rank for ref, rank in waiting.items() if ref not in set(ready)}
            except Exception:  # of one of them; one by one says whose, and raises it
                for ref in ready:
                    self._one(ref, waiting.pop(ref), waiting)
                raise
            for ref in ray.wait(list(pings), num_returns=len(pings), timeout=0)[0] if pings else ():
                self._pinged(ref, *pings.pop(ref), waiting)
        return outputs

    def _values(self, refs: Sequence[Any]) -> list[Any]:
        values = ray.get(list(refs))
        if self._columns is None:
            return values
        columns = [self._columns[ref] for ref in refs]
        return load_results(values, [None if known is None else list(known.values()) for known in columns])

    def _one(self, ref: Any, rank: int, waiting: Mapping[Any, int]) -> None:
        try:
            self._values([ref]) if ref in self._refs else ray.get(ref)
        except Exception as error:
            raise self._processes.failure(error, rank, self._role, f"{self._method}()", waiting) from None

    def _pinged(self, ref: Any, others: RayProcesses, rank: int, waiting: Mapping[Any, int]) -> None:
        if others is self._processes:
            self._one(ref, rank, waiting)
            return
        try:
            ray.get(ref)
        except RayActorError as error:
            if others.is_usable:  # else it was told before
                call = f"{self._role}.{self._method}()"
                raise others.failure(error, rank, others.name, call, {}) from None
