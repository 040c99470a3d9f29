"""The controller's side of workers: a WorkerGroup calls a registered method on all its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlcore.errors import did_you_mean
from rlcore.protocol import DataProto
from rlcore.protocol.dataproto import map_rows
from rlcore.protocol.remote import Owner, RemoteColumn
from rlcore.protocol.row_groups import row_groups, rows_of, split_evenly
from rlcore.workers.contract import CallArgs, DeclaredResult, first_batch
from rlcore.workers.dispatch import Execute, calls_of, join_rows
from rlcore.workers.future import Future, resolve, wait_for
from rlcore.workers.mesh import Mesh
from rlcore.workers.worker import Registration, Worker, registered_methods, registration_of

MAX_OUTSTANDING = 64
"""With more unread calls than this, a group stops tracking those that have ended without an error."""


class Processes(ABC):
    """The processes that an executor started for a pool: one per rank, with a worker of each role."""

    world_size: int
    meshes: dict[str, Mesh]
    """The mesh of each role whose group has asked for it."""

    @abstractmethod
    def submit(
        self,
        role: str,
        method: str,
        calls: Sequence[CallArgs | None],
        declared: Sequence[DeclaredResult | None] | None = None,
    ) -> Future:
        """Call `method` of a role's worker on every rank whose entry in `calls` is not None, after all earlier calls.

        Each rank checks its result against its entry in `declared`. Raises WorkerError at once when a process is
        known to have died.
        """

    @abstractmethod
    def spans(self) -> Future:
        """Ask all ranks for their spans since the last request, after all earlier calls; `get` returns a list[Span]."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes. A second call does nothing."""


class WorkerGroup(Owner):
    """The workers of one role, called together: `group.method(...)` for every registered method of their class.

    Each worker runs its calls in the order in which they were made. Remote columns are sent as references, and the
    worker that reads them waits for them. A call waits for a Future or a deferred DataProto among its arguments, whose
    contents are unknown. `fetched` counts the bytes of columns that this process has read, by column name.
    A batch that a call returns before it has ended is of the class of its first batch, else of `batch_class`.
    """

    batch_class: type[DataProto] = DataProto

    def __init__(self, processes: Processes, role: str, worker_cls: type[Worker]) -> None:
        self.role = role
        self._processes = processes
        self._worker_cls = worker_cls
        self._mesh: Mesh | None = None
        self._outstanding: list[Future] = []
        self.fetched: Counter[str] = Counter()

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._processes.world_size

    @property
    def mesh(self) -> Mesh:
        """The mesh coordinates that the workers declared with `set_mesh`; asked for once, at first use."""
        if self._mesh is None:
            calls: list[CallArgs | None] = [((), {})] * self.world_size
            # Asked late: a worker may declare its mesh in the first method that the group calls.
            self._mesh = Mesh(tuple(self._processes.submit(self.role, "_read_mesh", calls).outputs()))
            self._processes.meshes[self.role] = self._mesh
        return self._mesh

    @property
    def processes(self) -> Processes:
        """The processes of the workers, which the groups of several roles may share."""
        return self._processes

    def outstanding(self) -> list[Future]:
        """Return the calls that no caller has waited for, in order, and stop tracking them."""
        outstanding, self._outstanding = self._outstanding, []
        return [future for future in outstanding if not future.was_read]

    def drain(self) -> None:
        """Wait for the calls that no caller has waited for, in order, and raise the first error."""
        wait_for(self.outstanding())

    def map_rows(
        self, fn: Callable[[DataProto], Any], batch: DataProto, keep_together: Sequence[object] | None
    ) -> DataProto:
        """See Owner: the rows are split evenly over the workers, in whole groups."""
        parts = [rows_of(run) for run in split_evenly(row_groups(len(batch), keep_together), self.world_size)]
        future = self._apply(partial(map_rows, fn), [batch[rows] for rows in parts])
        # The workers got whole groups; the inverse permutation restores the batch's order.
        order = torch.tensor(rows_of(parts), dtype=torch.int64).argsort()
        return DataProto.deferred(lambda: future.get()[order])

    def reduce_rows(self, fn: Callable[[DataProto], Any], batch: DataProto) -> list[Any]:
        """See Owner."""
        return self._apply(fn, batch.chunk(self.world_size, uneven=True), collect=list).get()

    def _apply(
        self,
        fn: Callable[[DataProto], Any],
        parts: Sequence[DataProto],
        collect: Callable[[list[Any]], Any] = join_rows,
    ) -> Future:
        calls: list[CallArgs | None] = [((fn, part), {}) if len(part) else None for part in parts]
        if not any(calls):
            calls[0] = ((fn, parts[0]), {})  # without rows, one worker computes the empty result
        called = [rank for rank, call in enumerate(calls) if call is not None]
        future = self._processes.submit(self.role, "_apply", calls)
        return self._track(future, lambda outputs: collect([outputs[rank] for rank in called]))

    def _track(self, future: Future, collect: Callable[[list[Any]], Any]) -> Future:
        """Set how the future's results are collected, and keep it for `outstanding`."""

        def collect_with_owner(outputs: list[Any]) -> Any:
            result = collect(outputs)
            return self._with_owner(result) if isinstance(result, DataProto) else result

        future.collect_with(collect_with_owner)
        self._outstanding = [*(earlier for earlier in self._outstanding if not earlier.was_read), future]
        # A program that never drains must not keep all its results alive.
        if len(self._outstanding) > MAX_OUTSTANDING:
            self._outstanding = [earlier for earlier in self._outstanding if not earlier.has_succeeded()]
        return future

    def _with_owner(self, batch: DataProto) -> DataProto:
        for column in batch.table.columns.values():
            if isinstance(column, RemoteColumn):
                column.bind_owner(self, self.fetched)
        return batch

    def __getattr__(self, name: str) -> Callable[..., Any]:
        registration = None if name.startswith("_") else registration_of(self._worker_cls, name)
        if registration is None:
            raise AttributeError(_no_such_method(self._worker_cls, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, registration, args, kwargs)

        call.__name__ = name
        call.__doc__ = getattr(self._worker_cls, name).__doc__
        return call

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *registered_methods(self._worker_cls)]

    def _call(self, name: str, registration: Registration, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mode, contract = registration.mode, registration.contract
        # Contents of Futures and deferred batches are needed to split them; remote columns are split as references.
        args, kwargs = resolve(list(args)), resolve(dict(kwargs))
        contract.check(f"{self.role}.{name}()", args, kwargs, _producers)
        calls: list[CallArgs | None] = [*calls_of(mode, self, args, kwargs)]
        on_rank_zero = registration.execute is Execute.RANK_ZERO
        if on_rank_zero or mode.only_rank_zero:
            calls[1:] = [None] * (self.world_size - 1)
        declared = contract.declared_results(calls, args, kwargs)
        batch = first_batch(args, kwargs)
        batch_class = self.batch_class if batch is None else type(batch)
        future = self._processes.submit(self.role, name, calls, declared)
        gives_batch = mode.joins_rows and not on_rank_zero
        if declared is not None and gives_batch and not registration.blocking:
            batches = future.declared_batches(declared)
            if batches is not None:
                self._track(future, lambda outputs: None)  # so that `drain` sees its failure
                return batch_class._of(self._with_owner(mode.collect(self, batches)).table)
        self._track(future, _first if on_rank_zero else partial(mode.collect, self))
        if registration.blocking:
            return future.get()
        return batch_class.deferred(future.get) if gives_batch else future


def _first(outputs: list[Any]) -> Any:
    return outputs[0]


def _producers(name: str) -> str:
    """Return a sentence that names the registered methods which declare a column."""
    found = []
    for cls in _subclasses(Worker):
        for method in registered_methods(cls):
            registration = registration_of(cls, method)
            gives = registration.contract.gives if registration else None
            if isinstance(gives, Mapping) and name in gives:
                found.append(f"{cls.__name__}.{method}()")
    return f"It is returned by {', '.join(dict.fromkeys(found))}." if found else "Bind it, or call its producer first."


def _subclasses(cls: type[Worker]) -> Iterator[type[Worker]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _no_such_method(worker_cls: type[Worker], name: str) -> str:
    offered = registered_methods(worker_cls)
    if callable(getattr(worker_cls, name, None)):
        return f"{worker_cls.__name__}.{name} is not registered; decorate it with @register(...)."
    return f"{worker_cls.__name__} has no registered method {name!r}, only {offered}.{did_you_mean(name, offered)}"
