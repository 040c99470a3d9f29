"""The worker's side: the Worker base class, its context, and `register`, which lets groups call a method."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlcore.errors import ConfigError, WorkerError
from rlcore.workers.contract import Contract, Gives, Reads
from rlcore.workers.dispatch import CustomDispatch, Dispatch, DispatchMode, Execute, as_mode
from rlcore.workers.mesh import check_axes

if TYPE_CHECKING:
    import torch

    from rlcore.protocol import DataProto

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """How a group calls a worker method: its dispatch mode, the ranks that run it, and whether the call waits."""

    dispatch: Dispatch | DispatchMode
    execute: Execute
    blocking: bool
    contract: Contract

    @property
    def mode(self) -> DispatchMode:
        """The dispatch mode's pair of functions."""
        return self.dispatch.value if isinstance(self.dispatch, Dispatch) else self.dispatch


def register(
    dispatch_mode: Dispatch | CustomDispatch = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    reads: Reads = (),
    gives: Gives | None = None,
    rows: Callable[..., int] | None = None,
) -> Callable[[F], F]:
    """Let worker groups call the decorated method.

    With `blocking=True` a call waits and returns the result of the mode's collect function, of any type. With
    `blocking=False` it returns at once: a deferred DataProto in modes that join DataProtos, else a `Future`.
    A custom mode is `{"dispatch_fn": f(group, *args, **kwargs), "collect_fn": g(group, outputs)}`. Its f returns
    `(per-worker list for each argument, {name: per-worker list})`, or one list with each worker's only argument.

    `reads` names the columns that the first DataProto argument must have, `gives` the columns of the result, each with
    its ColumnSpec; either may be a function of the call's arguments. A call whose batch lacks a read column raises
    DataError. With `gives`, `blocking=False` and a mode that joins DataProtos, the call returns a batch of references
    at once and the controller waits for nothing. The result has as many rows as the DataProto sent to the worker, or as
    `rows` computes from a worker's arguments; the worker raises DataError when it returns anything else.

    The method may be `async def`. Raises ConfigError for an async generator, and for a custom mode of another form.
    """
    contract = Contract(reads, gives, rows)
    registration = Registration(as_mode(dispatch_mode), execute_mode, blocking, contract)

    def decorate(method: F) -> F:
        _refuse_async_generator(method)
        method._rlcore_registration = registration  # type: ignore[attr-defined]
        return method

    return decorate


def _refuse_async_generator(method: Callable[..., Any]) -> None:
    if inspect.isasyncgenfunction(inspect.unwrap(method)):
        raise ConfigError(
            f"{method.__qualname__} is an async generator, whose values cannot be sent one by one. Return a list of "
            "them, or let the caller call an `async def` method once for each value."
        )


def registration_of(worker_cls: type, name: str) -> Registration | None:
    """Return the registration of method `name`: the class's own, or that of the nearest base; None if there is none."""
    # An override without @register is still callable: the nearest registered base decides.
    for cls in worker_cls.__mro__:
        registration = getattr(cls.__dict__.get(name), "_rlcore_registration", None)
        if registration is not None:
            return registration
    return None


def registered_methods(worker_cls: type) -> list[str]:
    """Return the names of all methods that a group of `worker_cls` can call."""
    return [name for name in dir(worker_cls) if registration_of(worker_cls, name) is not None]


@dataclass(frozen=True)
class WorkerContext:
    """A worker's role, rank and host, and the address of its peers.

    `master` is the address and port of rank 0 of the same processes; None means that the worker shares this process
    with its peers. `gpus` is the worker's number of GPUs, possibly a share of one. `mesh` holds the coordinates that
    it gave to `set_mesh`.
    """

    role: str = "worker"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = "this process"
    gpus: float = 0.0
    master: tuple[str, int] | None = None
    mesh: Mapping[str, int] | None = None

    def __str__(self) -> str:
        return f"{rank_name(self.role, self.rank, self.world_size, self.mesh)} on {self.host}"


def rank_name(role: str, rank: int, world_size: int, mesh: Mapping[str, int] | None) -> str:
    """Return a rank's name for messages, with its mesh coordinates if it has declared them."""
    position = f" ({', '.join(f'{axis}={at}' for axis, at in mesh.items())})" if mesh else ""
    return f"{role} rank {rank} of {world_size}{position}"


_running: ContextVar[WorkerContext | None] = ContextVar("running", default=None)
"""The context of the worker whose code runs in this thread."""


@contextmanager
def running(worker: Worker) -> Iterator[None]:
    """Let workers that are constructed inside have this worker's context."""
    token = _running.set(worker._context)
    try:
        yield
    finally:
        _running.reset(token)


class Worker:
    """Base class of workers. Each rank has one object; a group calls its registered methods.

    An executor sets the context before `__init__` runs, so rank and world size are known there. A worker that another
    worker constructs has the context of that one; one constructed by hand elsewhere is rank 0 of 1.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise ConfigError if the class overrides a registered method with an async generator."""
        super().__init_subclass__(**kwargs)
        for name in registered_methods(cls):
            _refuse_async_generator(getattr(cls, name))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a worker with the context of the worker whose code runs, if one's does."""
        worker = super().__new__(cls)
        if (context := _running.get()) is not None:
            worker._context = context
        return worker

    _context = WorkerContext()
    _siblings: Mapping[str, Worker] = MappingProxyType({})
    _mesh_coords: Mapping[str, int] | None = None
    _mesh_was_read = False

    @property
    def rank(self) -> int:
        """This worker's number among its peers, from 0."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of peers, including this worker."""
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        """This worker's number among its peers on the same host, from 0."""
        return self._context.local_rank

    @property
    def host(self) -> str:
        """Address of the node that this worker runs on."""
        return self._context.host

    @property
    def device(self) -> torch.device:
        """The device for tensors: the worker's GPU if it has one, else the CPU."""
        import torch

        return torch.device("cuda", 0) if self._context.gpus > 0 else torch.device("cpu")

    def sibling(self, role: str) -> Worker:
        """Return this rank's worker of another role in the same process; WorkerError when there is none."""
        if role not in self._siblings:
            raise WorkerError(
                f"{self._context}: no role {role!r} shares its process, only {', '.join(self._siblings) or 'none'}"
            )
        return self._siblings[role]

    def set_mesh(self, **coordinates: int) -> None:
        """Declare this rank's mesh coordinates, once, such as `set_mesh(pp=0, tp=1, dp=0)`; without it, dp = rank.

        Axes are pp, tp, dp and micro_dp. Every rank must declare the same ones; an undeclared axis has size 1. Raises
        ConfigError for another axis, for coordinates that are not integers from 0, for a second call, and when the
        group has already split data over the mesh.
        """
        if self._mesh_was_read:
            raise ConfigError(
                f"{self._context}: set_mesh({coordinates}) comes too late, data was already split over the mesh "
                f"{dict(self._coordinates())}. Call it in __init__ or in the first method that the group calls."
            )
        if self._mesh_coords is not None:
            raise ConfigError(
                f"{self._context}: set_mesh({coordinates}) is the second call, after {dict(self._mesh_coords)}; call "
                "it once (a base class may have done so)"
            )
        if not coordinates or any(type(at) is not int or at < 0 for at in coordinates.values()):
            raise ConfigError(f"{self._context}: set_mesh({coordinates}) needs integers from 0, such as dp=0.")
        check_axes(coordinates)
        self._mesh_coords = coordinates
        self._context = replace(self._context, mesh=coordinates)

    def init_process_group(self, timeout: float = 1800.0) -> None:
        """Join torch.distributed's default group with all peers: gloo for CPU tensors, and nccl if there is a GPU.

        Waits up to `timeout` seconds for the peers. Roles in one process share the group, so a second call does
        nothing. Raises ConfigError for several ranks in one process.
        """
        import torch.distributed as dist

        context = self._context
        if context.master is None and context.world_size > 1:
            raise ConfigError(
                f"{context}: the in-process executor runs {context.world_size} ranks in turn, so they cannot "
                "communicate. Use cluster.executor=ray, or cluster.workers=1."
            )
        # Roles that share the process call it too, and the process has one default group.
        if dist.is_initialized():
            return
        wait = datetime.timedelta(seconds=timeout)
        store: Any
        if context.master is None:
            # A group of one still lets collectives run, without a socket.
            store = dist.HashStore()  # type: ignore[attr-defined]
        else:
            host, port = context.master
            store = dist.TCPStore(host, port, is_master=context.rank == 0, timeout=wait)  # type: ignore[attr-defined]
        backend = "gloo"
        if context.gpus > 0:
            import torch

            # nccl uses the current device, which is otherwise set only at the first kernel.
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size, timeout=wait)

    def shutdown(self) -> None:
        """Release resources outside this process. Only the in-process executor calls it; Ray kills its workers."""

    def _apply(self, fn: Callable[[DataProto], Any], batch: DataProto) -> Any:
        """Return `fn(batch)`, computed in the process that holds the rows."""
        return fn(batch)

    def _coordinates(self) -> Mapping[str, int]:
        return self._mesh_coords or {"dp": self.rank}

    def _read_mesh(self) -> Mapping[str, int]:
        """Return the mesh coordinates; the group asks once, and `set_mesh` is an error from then on."""
        coordinates = self._coordinates()
        self._mesh_was_read = True
        return coordinates


def construct(
    context: WorkerContext,
    cls: type[Worker],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    siblings: Mapping[str, Worker],
) -> Worker:
    """Return `cls(*args, **kwargs)`, with the context set before `__init__` runs.

    `siblings` holds the rank's workers of other roles in the same process; the executor may add more later.
    """
    # In two steps, so that `__init__` can use rank, device and siblings.
    worker = cls.__new__(cls)
    worker._context = context
    worker._siblings = siblings
    with running(worker):
        worker.__init__(*args, **kwargs)  # type: ignore[misc]
    return worker
