"""The Ray actor of one rank, which holds a worker of each role."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import inspect
import io
import itertools
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray

from rlcore.collector import pause_collector, resume_collector
from rlcore.errors import WorkerError
from rlcore.stacks import register_stacks
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.event_loop import MethodLoop, in_steps
from rlcore.workers.failure import naming_errors
from rlcore.workers.progress import ProgressWatch
from rlcore.workers.ray.call import await_inputs, decode_call
from rlcore.workers.ray.store import store_declared_result, store_result
from rlcore.workers.spans import MAX_SPANS, Span
from rlcore.workers.worker import Worker, WorkerContext, construct, running

_Begun: TypeAlias = AbstractContextManager[tuple[Any, DeclaredResult | None]]
"""A call whose method has been called; the context waits for its result, and is that and the declared result."""


@dataclass(frozen=True)
class HostInfo:
    """A started process's description of itself. `port` is where peers connect to rank 0; None on other ranks."""

    node: str
    address: str
    pid: int
    logs: tuple[str, ...]
    port: int | None


class WorkerHost:
    """The actor of one rank. Its methods run one at a time, in the order of the controller's calls.

    `is_async`: a worker has `async def` methods. Their calls begin in that order too, with `begin`; `run`, in a thread
    of COROUTINES, then waits for the result.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        distributions: Mapping[str, str],
        inline_bytes: int,
        one_node: bool,
        watch: ProgressWatch,
        is_async: bool = False,
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the controller stops the workers
        faulthandler.enable()  # a crash in C then leaves a traceback in the log
        register_stacks()
        pause_collector()  # until the end of the first call, which imports the models
        self._name = name
        self._rank = rank
        self._distributions = distributions
        self._inline_bytes = inline_bytes
        self._one_node = one_node
        self._watch = watch
        self._address: str = ray.util.get_node_ip_address()
        # Rank 0 serves torch.distributed's store. The port is reserved now and used when workers join.
        self._reserved_port = _reserve_port() if rank == 0 else None
        self._workers: dict[str, Worker] = {}
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._loop = MethodLoop(takes_turns=is_async)
        self._begun: dict[int, _Begun] = {}
        self._calls = itertools.count()

    def describe(self, log: Path | None) -> HostInfo:
        """Write to `log` from now on; return this process's node, address and logs.

        Raises WorkerError when the node lacks a needed distribution.
        """
        if log is not None:
            _write_to(log)
        for distribution, version in self._distributions.items():
            try:
                installed = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                installed = "not installed"
            if installed != version:
                raise WorkerError(
                    f"{self._name} rank {self._rank} on {self._address} ({platform.node()}): {distribution} is "
                    f"{installed} there, and {version} where the run was started. Install {distribution}=={version} "
                    "on that node."
                )

        logs = dict.fromkeys(os.path.realpath(f"/proc/self/fd/{fd}") for fd in (2, 1))
        port = self._reserved_port.getsockname()[1] if self._reserved_port is not None else None
        return HostInfo(ray.get_runtime_context().get_node_id(), self._address, os.getpid(), tuple(logs), port)

    def set_context(self, world_size: int, local_rank: int, gpus: float, master: tuple[str, int]) -> None:
        """Store the context of this process's workers, and set torch.distributed's environment variables."""
        self._context: dict[str, Any] = {"world_size": world_size, "local_rank": local_rank, "gpus": gpus}
        self._context |= {"rank": self._rank, "host": self._address, "master": master}
        os.environ["RANK"] = str(self._rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        # Programs use it as the index of a CUDA device, and a worker sees only its own GPUs, numbered from 0.
        os.environ["LOCAL_RANK"] = "0" if gpus > 0 else str(local_rank)
        os.environ["MASTER_ADDR"] = master[0]
        os.environ["MASTER_PORT"] = str(master[1])

    def construct(self, role: str, class_args: tuple[type[Worker], tuple[Any, ...], Mapping[str, Any]]) -> None:
        """Construct the worker of a role from its class, positional and keyword arguments."""
        context = WorkerContext(role=role, **self._context)
        with naming_errors(context, "__init__"), self._watch.calling(role, "__init__"):
            self._workers[role] = construct(context, *class_args, siblings=self._workers)

    def run(self, message: bytes | int, /, *extra: Any, after: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the blocks of a method's result, and then the rest of the result.

        `message` and `extra` come from `encode_calls`, or `message` from `begin`. Waits first for the references in
        `after`: answers of processes with an earlier turn on this place. Raises the error for the controller, also when
        the method returns anything other than its declared result.
        """
        with self._begun_call(message, extra, after) as (result, _):
            yield from store_result(result, self._inline_bytes, self._one_node)

    def run_declared(self, message: bytes | int, /, *extra: Any, after: Sequence[Any] = ()) -> Any:
        """Return a method's result, and then one value per column that may be large; see `run`.

        For a call with a declared result, on a cluster of one node.
        """
        with self._begun_call(message, extra, after) as (result, declared):
            assert declared is not None
            values = store_declared_result(result, self._inline_bytes, declared.may_exceed(self._inline_bytes))
            return values if len(values) > 1 else values[0]  # Ray expects no list for num_returns=1

    def begin(self, message: bytes, /, *extra: Any, after: Sequence[Any] = ()) -> int:
        """Begin a call of an `async def` method, and return its number for `run` or `run_declared`."""
        number = next(self._calls)
        self._begun[number] = self._begun_call(message, extra, after)
        return number

    def _begun_call(self, message: bytes | int, extra: Sequence[Any], after: Sequence[Any]) -> _Begun:
        if isinstance(message, int):
            return self._begun.pop(message)
        role, method, declared, args, kwargs = decode_call(message, extra)
        worker = self._workers[role]
        arrived = time.time()
        with naming_errors(worker._context, method):
            # Only wait: a failure there belongs to the other group's caller.
            if after:
                ray.wait(list(after), num_returns=len(after), fetch_local=False)
            await_inputs([args, kwargs])
        began = time.time()
        result = self._call(worker, role, method, args, kwargs)
        return self._ending(worker, method, declared, arrived, began, result)

    def _call(self, worker: Worker, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a method's result, or the future of its coroutine, which has started."""

        @contextmanager
        def within() -> Iterator[None]:
            with self._watch.calling(role, method), running(worker):
                yield

        async def to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
            with naming_errors(worker._context, method):
                return await in_steps(coroutine, within)

        try:
            with naming_errors(worker._context, method), self._loop.alone(), within():
                result = getattr(worker, method)(*args, **kwargs)
        finally:
            # The first call has imported the models; from now on garbage is collected.
            resume_collector()
        return self._loop.start(to_end(result)) if inspect.iscoroutine(result) else result

    @contextmanager
    def _ending(
        self, worker: Worker, method: str, declared: DeclaredResult | None, arrived: float, began: float, result: Any
    ) -> Iterator[tuple[Any, DeclaredResult | None]]:
        result = _result_of(result)
        with naming_errors(worker._context, method):
            if declared is not None:
                declared.check(result)
            yield result, declared
        role = worker._context.role
        self._spans.append(Span(role, method, self._rank, self._address, os.getpid(), arrived, began, time.time()))

    def call(self, role: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return the whole result of a role's method, for callers that hold this process's handle."""
        return _result_of(self._call(self._workers[role], role, method, args, kwargs))

    def spans(self) -> list[Span]:
        """Return the spans since the last call of `spans`."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def ping(self) -> None:
        """Return None; the call fails if the process is dead."""


def _result_of(result: Any) -> Any:
    return result.result() if isinstance(result, Future) else result


def _write_to(log: Path) -> None:
    """Send stdout and stderr, C and Python alike, and rlcore's log records to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("rlcore").addHandler(handler)
    logging.getLogger("rlcore").setLevel(logging.INFO)


def _reserve_port() -> socket.socket:
    """Return a socket that is bound to a free port but does not listen.

    While it is open, the system gives the port to no other program. torch's store, which also sets SO_REUSEADDR, can
    still bind and listen on it when the workers connect.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    return reserved
