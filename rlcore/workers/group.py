"""The controller's side: a WorkerGroup calls a registered method on all its workers; a Future is a call under way."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlcore.errors import did_you_mean
from rlcore.protocol import DataProto
from rlcore.protocol.dataproto import map_rows
from rlcore.protocol.remote import Owner, RemoteColumn
from rlcore.protocol.row_groups import row_groups, split_evenly
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.dispatch import Call, Execute, Mesh, calls_of, join_rows
from rlcore.workers.worker import Registration, Worker, registered_methods, registration_of

MOST_OUTSTANDING = 64
"""Calls that nobody has waited for, from which on a group looks which of them have ended well."""


class PendingCall(ABC):
    """One method call under way on some ranks. `was_read`: somebody has seen its results or its failure."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._outputs: list[Any] | None = None
        self._error: Exception | None = None
        self.was_read = False

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return or raise at once."""

    @abstractmethod
    def wait(self) -> list[Any]:
        """Return every rank's result (None for one that was not called), or raise the first failure of any rank."""

    def settle(self) -> None:
        """Wait, and keep the results or the failure for whoever asks."""
        with self._lock:
            if not self.is_settled:
                try:
                    self._outputs = self.wait()
                except Exception as error:
                    self._error = error

    def get(self) -> list[Any]:
        """Wait, and return or raise the same at every call."""
        self.settle()
        self.was_read = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._outputs is not None
        return self._outputs

    @property
    def is_settled(self) -> bool:
        """Whether the results or the failure are here."""
        return self._outputs is not None or self._error is not None

    @property
    def succeeded(self) -> bool:
        """Whether the results are here."""
        return self._outputs is not None

    def declared_batch(self, rank: int, declared: DeclaredResult) -> DataProto | None:
        """Return what a rank will return, by reference; None where results have no references."""
        return None


class Processes(ABC):
    """What an executor started for a pool: one process a rank, with one worker for each role in it."""

    world_size: int
    meshes: dict[str, Mesh]
    """The mesh of each role whose group has asked for it."""

    @abstractmethod
    def submit(
        self,
        role: str,
        method: str,
        calls: Sequence[Call | None],
        declared: Sequence[DeclaredResult | None] | None = None,
    ) -> PendingCall:
        """Call `method` of a role's worker on every rank whose entry in `calls` is not None, after all earlier calls.

        Each rank checks that it returns what was `promised` of it. Raises WorkerError at once when one of the
        processes is known to have died.
        """

    @abstractmethod
    def spans(self) -> PendingCall:
        """Ask every rank for the spans of what it ran since it was last asked, after all earlier calls."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes. Does nothing the second time."""


class Future:
    """The result of a non-blocking call."""

    def __init__(self, pending: PendingCall, collect: Callable[[list[Any]], Any]) -> None:
        self._pending = pending
        self._collect = collect
        self._lock = threading.RLock()
        self._result: Any = None
        self._error: Exception | None = None
        self._collected = False

    @property
    def was_read(self) -> bool:
        """Whether somebody has waited for the workers, and so seen their results or the failure."""
        return self._pending.was_read

    def done(self) -> bool:
        """Whether `get` would return or raise at once."""
        return self.was_read or self._pending.done()

    def has_succeeded(self) -> bool:
        """Whether the workers have finished, without a failure. Never waits for them."""
        if self._pending.done():
            self._pending.settle()
        return self._pending.succeeded

    def get(self) -> Any:
        """Wait and return the collected result, or raise the first error of a worker; the same at every call."""
        with self._lock:
            if not self._collected:
                try:
                    self._result = self._collect(self._pending.get())
                except Exception as error:
                    self._error = error
                self._collected = True
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._result


class WorkerGroup(Owner):
    """The workers of one role, called as one: `group.method(...)` for every registered method of their class.

    Calls run on each worker in the order in which they were made. Columns that are elsewhere, or not made yet, are sent
    as references, and the worker that needs them waits for them; a Future or a deferred DataProto, of which nothing is
    known yet, is waited for here. `fetched` counts, by column, the bytes of columns that this process has read.
    """

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
        """Each rank's place, as the workers declared it with `set_mesh`; asked for once, at the first use."""
        if self._mesh is None:
            calls: list[Call | None] = [((), {})] * self.world_size
            self._mesh = Mesh(tuple(self._processes.submit(self.role, "_read_mesh", calls).wait()))
            self._processes.meshes[self.role] = self._mesh
        return self._mesh

    @property
    def processes(self) -> Processes:
        """The processes, which the groups of several roles may share."""
        return self._processes

    def outstanding(self) -> list[Future]:
        """Hand over the calls that nobody has waited for yet, in order."""
        outstanding, self._outstanding = self._outstanding, []
        return [future for future in outstanding if not future.was_read]

    def drain(self) -> None:
        """Wait for the calls that nobody has waited for yet, in order, and raise the first error."""
        wait_for(self.outstanding())

    def map_rows(
        self, fn: Callable[[DataProto], Any], batch: DataProto, keep_together: Sequence[object] | None
    ) -> DataProto:
        """See Owner: the rows are cut evenly over the workers, whole units to each."""
        runs = split_evenly(row_groups(len(batch), keep_together), self.world_size)
        parts = [[row for unit in run for row in unit] for run in runs]
        future = self._apply(partial(map_rows, fn), [batch[rows] for rows in parts])
        back = torch.tensor([row for rows in parts for row in rows], dtype=torch.int64).argsort()
        return DataProto.deferred(lambda: future.get()[back])

    def reduce_rows(self, fn: Callable[[DataProto], Any], batch: DataProto) -> list[Any]:
        """See Owner."""
        return self._apply(fn, batch.chunk(self.world_size, uneven=True), collect=list).get()

    def _apply(
        self,
        fn: Callable[[DataProto], Any],
        parts: Sequence[DataProto],
        collect: Callable[[list[Any]], Any] = join_rows,
    ) -> Future:
        calls: list[Call | None] = [((fn, part), {}) if len(part) else None for part in parts]
        if not any(calls):
            calls[0] = ((fn, parts[0]), {})  # no rows at all: one worker says what comes of them
        asked = [rank for rank, call in enumerate(calls) if call is not None]
        pending = self._processes.submit(self.role, "_apply", calls)
        return self._future(pending, lambda outputs: collect([outputs[rank] for rank in asked]))

    def _future(self, pending: PendingCall, collect: Callable[[list[Any]], Any]) -> Future:
        def collected(outputs: list[Any]) -> Any:
            result = collect(outputs)
            return self._with_owner(result) if isinstance(result, DataProto) else result

        future = Future(pending, collected)
        self._outstanding = [*(earlier for earlier in self._outstanding if not earlier.was_read), future]
        if len(self._outstanding) > MOST_OUTSTANDING:  # a program that never drains need not hold all that it made
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
        args, kwargs = resolve(list(args)), resolve(dict(kwargs))
        contract.check(f"{self.role}.{name}()", args, kwargs, _givers)
        calls: list[Call | None] = [*calls_of(mode, self, args, kwargs)]
        rank_zero = registration.execute is Execute.RANK_ZERO
        if rank_zero or mode.only_rank_zero:
            calls[1:] = [None] * (self.world_size - 1)
        columns = contract.columns(args, kwargs)
        declared: list[DeclaredResult | None] | None = None
        if columns is not None:
            declared = [None if call is None else contract.declared_result(columns, *call) for call in calls]
        pending = self._processes.submit(self.role, name, calls, declared)
        collect = (lambda outputs: outputs[0]) if rank_zero else (lambda outputs: mode.collect(self, outputs))
        joins = mode.joins_rows and not rank_zero
        if declared is not None and joins and not registration.blocking:
            batches = [None if p is None else pending.declared_batch(rank, p) for rank, p in enumerate(declared)]
            if all((batch is None) == (call is None) for batch, call in zip(batches, calls, strict=True)):
                self._future(pending, lambda outputs: None)  # for `drain`
                return self._with_owner(mode.collect(self, batches))
        future = self._future(pending, collect)
        if registration.blocking:
            return future.get()
        return DataProto.deferred(future.get) if joins else future


def _givers(name: str) -> str:
    """Return in words which registered methods declare that they give a column."""
    classes, found = [Worker], []
    for cls in classes:
        classes += [further for further in cls.__subclasses__() if further not in classes]
        for method in registered_methods(cls):
            registration = registration_of(cls, method)
            gives = registration.contract.gives if registration else None
            if isinstance(gives, Mapping) and name in gives:
                found.append(f"{cls.__name__}.{method}()")
    return f"It is given by {', '.join(dict.fromkeys(found))}." if found else "Bind it, or call what gives it, first."


def wait_for(futures: Sequence[Future]) -> None:
    """Wait for calls, in order, and raise the first error that was not raised before."""
    for future in futures:
        if not future.was_read:
            future.get()


def resolve(value: Any) -> Any:
    """Return an argument with every Future in it, also inside lists, tuples and dicts, replaced by its result.

    A deferred DataProto is waited for here, as nothing is known of it; columns that are references are not.
    """
    if isinstance(value, Future):
        return value.get()
    if isinstance(value, DataProto):
        _ = value.table
        return value
    if type(value) in (list, tuple):
        return type(value)(resolve(item) for item in value)
    if type(value) is dict:
        return {key: resolve(item) for key, item in value.items()}
    return value


def _no_such_method(worker_cls: type[Worker], name: str) -> str:
    offered = registered_methods(worker_cls)
    if callable(getattr(worker_cls, name, None)):
        return f"{worker_cls.__name__}.{name} is not open to groups; decorate it with @register(...)."
    return f"{worker_cls.__name__} has no registered method {name!r}, only {offered}.{did_you_mean(name, offered)}"
