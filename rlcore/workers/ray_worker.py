"""What runs in a Ray worker process: one host actor a rank, which holds a worker of each role."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import io
import os
import platform
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rlcore.collector import pause_collector, resume_collector
from rlcore.errors import WorkerError
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.failure import with_worker
from rlcore.workers.ray_call import decode_call
from rlcore.workers.ray_store import await_inputs, store_declared_result, store_result
from rlcore.workers.spans import MOST_SPANS, Span
from rlcore.workers.worker import Worker, WorkerContext, construct


@dataclass(frozen=True)
class HostInfo:
    """What a started process says of itself. `port` is where rank 0's peers will meet; None on other ranks."""

    node: str
    address: str
    pid: int
    logs: tuple[str, ...]
    port: int | None


class WorkerHost:
    """The actor of one rank. Its methods run one at a time, in the order in which the controller made the calls."""

    def __init__(
        self,
        name: str,
        rank: int,
        log: Path | None,
        distributions: Mapping[str, str],
        inline_bytes: int,
        one_node: bool,
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's; workers must outlive it
        if log is not None:
            _write_to(log)
        faulthandler.enable()
        pause_collector()  # until the first call has ended, as models are imported in it
        self._name = name
        self._rank = rank
        self._distributions = distributions
        self._inline_bytes = inline_bytes
        self._one_node = one_node
        self._address: str = ray.util.get_node_ip_address()
        self._held = _hold_port() if rank == 0 else None
        self._workers: dict[str, Worker] = {}
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    def describe(self) -> HostInfo:
        """Return where this process runs. Raises WorkerError when the node lacks a distribution that the run needs."""
        for distribution, version in self._distributions.items():
            try:
                here = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                here = "not installed"
            if here != version:
                raise WorkerError(
                    f"{self._name} rank {self._rank} on {self._address} ({platform.node()}): {distribution} is {here} "
                    f"there, and {version} where the run was started. Install {distribution}=={version} on that node."
                )

        logs = dict.fromkeys(os.path.realpath(f"/proc/self/fd/{fd}") for fd in (2, 1))
        port = self._held.getsockname()[1] if self._held is not None else None
        return HostInfo(ray.get_runtime_context().get_node_id(), self._address, os.getpid(), tuple(logs), port)

    def place(self, world_size: int, local_rank: int, gpus: float, master: tuple[str, int]) -> None:
        """Learn this process's place, and tell it to code that reads torch.distributed's environment variables."""
        self._place: dict[str, Any] = {"world_size": world_size, "local_rank": local_rank, "gpus": gpus}
        self._place |= {"rank": self._rank, "host": self._address, "master": master}
        os.environ["RANK"] = str(self._rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        # The index of a CUDA device, for those who use it so: a worker with GPUs sees only its own, from 0.
        os.environ["LOCAL_RANK"] = "0" if gpus > 0 else str(local_rank)
        os.environ["MASTER_ADDR"] = master[0]
        os.environ["MASTER_PORT"] = str(master[1])

    def make(self, role: str, made: tuple[type[Worker], tuple[Any, ...], Mapping[str, Any]]) -> None:
        """Make the worker of a role."""
        context = WorkerContext(role=role, **self._place)
        try:
            self._workers[role] = construct(context, *made, siblings=self._workers)
        except (Exception, SystemExit) as error:
            raise with_worker(error, context, "__init__") from None

    def run(self, message: bytes, /, *extra: Any, after: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the blocks of what a role's method returns, and then the rest of it.

        The call is what `encode_calls` made. Waits first until what `after` refers to is there: whoever has the turn
        before this process. Raises what the controller is to see; also when the method returns other than it has
        declared.
        """
        with self._running(message, extra, after) as (result, _):
            yield from store_result(result, self._inline_bytes, self._one_node)

    def run_declared(self, message: bytes, /, *extra: Any, after: Sequence[Any] = ()) -> Any:
        """Return what a role's method returns, and a value for each column that may be large; see `run`.

        For a call that has promised its columns, where there is one node.
        """
        with self._running(message, extra, after) as (result, declared):
            assert declared is not None
            values = store_declared_result(result, self._inline_bytes, declared.may_exceed(self._inline_bytes))
            return values if len(values) > 1 else values[0]  # as Ray has it

    @contextmanager
    def _running(
        self, message: bytes, extra: Sequence[Any], after: Sequence[Any]
    ) -> Iterator[tuple[Any, DeclaredResult | None]]:
        """Give the result of a call and what was promised of it; errors on the way, and in the block, name the call."""
        role, method, declared, args, kwargs = decode_call(message, extra)
        worker = self._workers[role]
        arrived = time.time()
        try:
            if after:
                ray.wait(list(after), num_returns=len(after), fetch_local=False)
            await_inputs([args, kwargs])
            began = time.time()
            result = getattr(worker, method)(*args, **kwargs)
            if declared is not None:
                declared.check(result)
            yield result, declared
            self._spans.append(Span(role, method, self._rank, self._address, os.getpid(), arrived, began, time.time()))
        except (Exception, SystemExit) as error:
            raise with_worker(error, worker._context, method) from None
        finally:
            resume_collector()

    def call(self, role: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return what a role's method returns, whole, for whoever holds this process's handle."""
        worker = self._workers[role]
        try:
            return getattr(worker, method)(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise with_worker(error, worker._context, method) from None
        finally:
            resume_collector()

    def spans(self) -> list[Span]:
        """Return what ran since the last call of this."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def ping(self) -> None:
        """Return, which a dead process does not."""


def _write_to(log: Path) -> None:
    """Send stdout and stderr, C and Python alike, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _hold_port() -> socket.socket:
    """Return a socket that is bound to a free port but does not listen.

    While it is open the system gives the port to nobody else, and torch's store, which also sets SO_REUSEADDR, can
    still bind and listen on it whenever the workers meet.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    return held
