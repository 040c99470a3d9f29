"""The in-process executor: every worker is an object in this process, for tests and plain breakpoints."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcore.config.schema import ClusterConfig
from rlcore.errors import RLCoreError
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.dispatch import Call
from rlcore.workers.executor import KERNEL_CACHES, Executor
from rlcore.workers.failure import with_worker
from rlcore.workers.group import PendingCall, Processes, WorkerGroup
from rlcore.workers.pool import ClassWithInitArgs, ResourcePool
from rlcore.workers.spans import MOST_SPANS, Span
from rlcore.workers.worker import Worker, WorkerContext, construct


class FinishedCall(PendingCall):
    """A call that has run: results by rank, or the first failure."""

    def __init__(self, results: list[Any], failure: RLCoreError | None) -> None:
        super().__init__()
        self._results = results
        self._failure = failure

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> list[Any]:
        """Return the results or raise the failure."""
        if self._failure is not None:
            raise self._failure
        return self._results


class InProcess(Processes):
    """One worker for each rank and role; a call runs at once, rank after rank, and stops at the first failure."""

    def __init__(self, world_size: int, classes: Mapping[str, ClassWithInitArgs], gpus: float) -> None:
        self.world_size = world_size
        self.meshes = {}
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._workers: dict[str, list[Worker]] = {role: [] for role in classes}
        by_rank: list[dict[str, Worker]] = [{} for _ in range(world_size)]
        for role, made in classes.items():
            for rank in range(world_size):
                context = WorkerContext(role, rank, world_size, local_rank=rank, gpus=gpus)
                try:
                    worker = construct(context, made.cls, made.args, made.kwargs, siblings=by_rank[rank])
                except (Exception, SystemExit) as error:
                    raise with_worker(error, context, "__init__") from error
                self._workers[role].append(worker)
                by_rank[rank][role] = worker

    def submit(
        self,
        role: str,
        method: str,
        calls: Sequence[Call | None],
        declared: Sequence[DeclaredResult | None] | None = None,
    ) -> FinishedCall:
        """Run the call now."""
        outputs: list[Any] = [None] * self.world_size
        for rank, call in enumerate(calls):
            if call is None:
                continue
            worker = self._workers[role][rank]
            began = time.time()
            try:
                outputs[rank] = getattr(worker, method)(*call[0], **call[1])
                if declared is not None and (what := declared[rank]) is not None:
                    what.check(outputs[rank])
                self._spans.append(Span(role, method, rank, worker.host, os.getpid(), began, began, time.time()))
            except (Exception, SystemExit) as error:
                failure = with_worker(error, worker._context, method)
                failure.__cause__ = error
                return FinishedCall(outputs, failure)
        return FinishedCall(outputs, None)

    def spans(self) -> FinishedCall:
        """See Processes."""
        spans = list(self._spans)
        self._spans.clear()
        return FinishedCall([spans], None)

    def shutdown(self) -> None:
        """Shut the workers down and let them go."""
        for workers in self._workers.values():
            for worker in workers:
                worker.shutdown()
            workers.clear()


class InProcessExecutor(Executor):
    """Runs all ranks of all groups in turn, in this process. A rank cannot communicate with another."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._started: list[InProcess] = []
        self._had_process_group = False
        self._threads: int | None = None
        self._set: list[str] = []

    def start(self) -> None:
        """Take `cpus_per_worker` torch threads and bound the kernels that torch keeps (in a process that has none yet).

        Notes what to put back in `shutdown`, torch.distributed's use too.
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
        """Return places for `workers` ranks; all run in this process, so cores are not counted and nodes not chosen."""
        gpus = self._cluster.gpus_per_worker if gpus_per_worker is None else gpus_per_worker
        return ResourcePool([self._cluster.workers if workers is None else workers], gpus_per_worker=gpus)

    def worker_group(self, pool: ResourcePool, classes: Any, name: str = "worker") -> Any:
        """Make the workers of every rank, one after the other."""
        roles = {name: classes} if isinstance(classes, ClassWithInitArgs) else dict(classes)
        processes = self.make_workers(pool.world_size, roles, pool.gpus_per_worker)
        self._started.append(processes)
        groups = {role: WorkerGroup(processes, role, made.cls) for role, made in roles.items()}
        return groups[name] if isinstance(classes, ClassWithInitArgs) else groups

    def make_workers(self, world_size: int, classes: Mapping[str, ClassWithInitArgs], gpus: float) -> InProcess:
        """Return the workers of a group of `world_size` ranks, one of each class a rank."""
        return InProcess(world_size, classes, gpus)

    def shutdown(self) -> None:
        """Let all workers go, and leave the process group of one that a worker made."""
        for processes in self._started:
            processes.shutdown()
        self._started.clear()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None
        for name in self._set:
            del os.environ[name]
        self._set.clear()
        if _process_group_exists() and not self._had_process_group:
            import torch.distributed as dist

            dist.destroy_process_group()


def _process_group_exists() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
