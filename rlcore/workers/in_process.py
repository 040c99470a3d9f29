"""The in-process executor: every worker is an object in this process, for tests and debugging with breakpoints."""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlcore.config.schema import ClusterConfig
from rlcore.errors import RLCoreError
from rlcore.protocol import DataProto
from rlcore.workers.contract import CallArgs, DeclaredResult
from rlcore.workers.event_loop import STOP_SECONDS, MethodLoop, has_async_methods, in_steps
from rlcore.workers.executor import KERNEL_CACHES, Executor
from rlcore.workers.failure import naming_errors
from rlcore.workers.future import Future
from rlcore.workers.group import Processes, WorkerGroup
from rlcore.workers.pool import ClassWithInitArgs, ResourcePool
from rlcore.workers.spans import MAX_SPANS, Span
from rlcore.workers.worker import Worker, WorkerContext, construct, running


class FinishedCall(Future):
    """A call made in this process: results by rank, or the first failure; `running`: coroutines that have not ended."""

    def __init__(
        self,
        results: list[Any],
        failure: RLCoreError | None,
        running: Mapping[int, concurrent.futures.Future[Any]] | None = None,
    ) -> None:
        super().__init__()
        self._results = results
        self._failure = failure
        self._running = running or {}

    def done(self) -> bool:
        """Return whether every rank has returned, or one has failed."""
        ended = [rank for rank in self._running.values() if rank.done()]
        return len(ended) == len(self._running) or any(rank.exception() for rank in ended)

    def wait(self) -> list[Any]:
        """Return the results or raise the failure."""
        if self._failure is not None:
            raise self._failure
        ranks = self._running.values()
        for rank in concurrent.futures.wait(ranks, return_when=concurrent.futures.FIRST_EXCEPTION).done:
            rank.result()
        return [
            self._running[rank].result() if rank in self._running else result
            for rank, result in enumerate(self._results)
        ]


def _sent(value: Any) -> Any:
    """Return a value with its batches as another process would get them: writes into them do not reach the sender."""
    if isinstance(value, DataProto):
        return value._of(value.table.immutable())
    if type(value) in (list, tuple):
        return type(value)(map(_sent, value))
    return {key: _sent(each) for key, each in value.items()} if type(value) is dict else value


class InProcess(Processes):
    """One worker per rank and role. A call runs at once, rank after rank, and stops at the first failure.

    Calls of `async def` methods start at once, and run on one event loop for all ranks.
    """

    def __init__(self, world_size: int, classes: Mapping[str, ClassWithInitArgs], gpus: float) -> None:
        self.world_size = world_size
        self.meshes = {}
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._loop = MethodLoop(takes_turns=has_async_methods(class_args.cls for class_args in classes.values()))
        self._workers: dict[str, list[Worker]] = {role: [] for role in classes}
        by_rank: list[dict[str, Worker]] = [{} for _ in range(world_size)]
        for role, class_args in classes.items():
            for rank in range(world_size):
                context = WorkerContext(role, rank, world_size, local_rank=rank, gpus=gpus)
                with naming_errors(context, "__init__"):
                    worker = construct(
                        context, class_args.cls, class_args.args, class_args.kwargs, siblings=by_rank[rank]
                    )
                self._workers[role].append(worker)
                by_rank[rank][role] = worker

    def submit(
        self,
        role: str,
        method: str,
        calls: Sequence[CallArgs | None],
        declared: Sequence[DeclaredResult | None] | None = None,
    ) -> FinishedCall:
        """Run the call now."""
        outputs: list[Any] = [None] * self.world_size
        started: dict[int, concurrent.futures.Future[Any]] = {}
        for rank, call in enumerate(calls):
            if call is None:
                continue
            worker = self._workers[role][rank]
            ended = partial(self._end, worker, method, time.time(), None if declared is None else declared[rank])
            try:
                with naming_errors(worker._context, method):
                    args, kwargs = map(_sent, call[0]), {name: _sent(value) for name, value in call[1].items()}
                    with self._loop.alone(), running(worker):
                        result = getattr(worker, method)(*args, **kwargs)
                    if inspect.iscoroutine(result):
                        started[rank] = self._loop.start(_await(result, worker, method, ended))
                    else:
                        outputs[rank] = ended(result)
            except RLCoreError as failure:
                # Kept, not raised: as on Ray, the error surfaces where the result is read.
                return FinishedCall(outputs, failure)
        return FinishedCall(outputs, None, started)

    def _end(self, worker: Worker, method: str, began: float, declared: DeclaredResult | None, result: Any) -> Any:
        result = _sent(result)
        if declared is not None:
            declared.check(result)
        role, rank = worker._context.role, worker.rank
        self._spans.append(Span(role, method, rank, worker.host, os.getpid(), began, began, time.time()))
        return result

    def spans(self) -> FinishedCall:
        """See Processes."""
        spans = list(self._spans)
        self._spans.clear()
        return FinishedCall(spans, None)

    def shutdown(self) -> None:
        """Cancel the calls of `async def` methods, shut the workers down, and drop them."""
        self._loop.cancel()
        try:
            for workers in self._workers.values():
                while workers:
                    shutdown: Callable[[], Any] = workers.pop(0).shutdown
                    if inspect.iscoroutine(ended := shutdown()):
                        self._loop.start(ended).result(STOP_SECONDS)
        finally:
            self._loop.stop()


async def _await(coroutine: Coroutine[Any, Any, Any], worker: Worker, method: str, ended: Callable[[Any], Any]) -> Any:
    with naming_errors(worker._context, method):
        return ended(await in_steps(coroutine, partial(running, worker)))


class InProcessExecutor(Executor):
    """Runs all ranks of all groups in turn, in this process. Ranks cannot communicate with one another."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._started: list[InProcess] = []
        self._had_process_group = False
        self._threads: int | None = None
        self._set: list[str] = []

    def start(self) -> None:
        """Set torch to `cpus_per_worker` threads, and bound the kernel caches of a process that has no kernels yet.

        Records the settings that `shutdown` restores, and whether torch.distributed was in use.
        """
        self._had_process_group = _process_group_exists()
        for name, value in KERNEL_CACHES.items():
            if name not in os.environ:
                os.environ[name] = value
                self._set.append(name)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(self._cluster.cpus_per_worker)

    def resource_pool(
        self,
        workers: int | None = None,
        *,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        node: str | None = None,
        name: str = "a pool",
    ) -> ResourcePool:
        """Return places for `workers` ranks, all in this process; `cpus_per_worker` and `node` have no effect."""
        gpus = self._cluster.gpus_per_worker if gpus_per_worker is None else gpus_per_worker
        return ResourcePool([self._cluster.workers if workers is None else workers], gpus_per_worker=gpus)

    def worker_group(self, pool: ResourcePool, classes: Any, name: str = "worker") -> Any:
        """Construct the workers of all ranks, one after the other."""
        roles = {name: classes} if isinstance(classes, ClassWithInitArgs) else dict(classes)
        processes = self.make_workers(pool.world_size, roles, pool.gpus_per_worker)
        self._started.append(processes)
        groups = {role: WorkerGroup(processes, role, class_args.cls) for role, class_args in roles.items()}
        return groups[name] if isinstance(classes, ClassWithInitArgs) else groups

    def make_workers(self, world_size: int, classes: Mapping[str, ClassWithInitArgs], gpus: float) -> InProcess:
        """Return the workers of a group of `world_size` ranks, one of each class a rank."""
        return InProcess(world_size, classes, gpus)

    def shutdown(self) -> None:
        """Drop all workers, restore the settings, and destroy the process group that a worker created."""
        for processes in self._started:
            processes.shutdown()
        self._started.clear()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None
        for name in self._set:
            del os.environ[name]
        self._set.clear()
        # The group may be the program's own; only one that a worker created here is destroyed.
        if _process_group_exists() and not self._had_process_group:
            import torch.distributed as dist

            dist.destroy_process_group()


def _process_group_exists() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
