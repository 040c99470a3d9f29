"""The interface of executors, which start worker processes: on Ray, or all inside this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self, overload

from rlcore.workers.group import WorkerGroup
from rlcore.workers.pool import ClassWithInitArgs, ResourcePool


class ProcessRequest(NamedTuple):
    """Processes to start: the pool they run on, the worker class of each role in them, and their name."""

    pool: ResourcePool
    classes: Mapping[str, ClassWithInitArgs]
    name: str


KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""Environment variables that bound how many compiled kernels oneDNN and torch keep, unless the user sets them.

In bf16 on the CPU they compile one kernel per shape, of up to a MiB, and keep 1,024 by default. Micro-batches of
different lengths rarely repeat a shape (benchmarks/NOTES.md).
"""


class Executor(ABC):
    """Starts worker processes in pools and returns the groups that call them. A context manager: start, shutdown."""

    @abstractmethod
    def start(self) -> None:
        """Prepare to start workers. Raises WorkerError when the cluster cannot be reached or started in time."""

    @abstractmethod
    def resource_pool(
        self,
        workers: int | None = None,
        *,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        node: str | None = None,
        name: str = "a pool",
    ) -> ResourcePool:
        """Return a pool of places for `workers` processes; arguments that are None come from the cluster's config.

        `node` is a Ray resource that the pool's nodes must have; None allows any node. Messages call the pool `name`.
        """

    @overload
    def worker_group(self, pool: ResourcePool, classes: ClassWithInitArgs, name: str = "worker") -> WorkerGroup: ...

    @overload
    def worker_group(
        self, pool: ResourcePool, classes: Mapping[str, ClassWithInitArgs], name: str = "worker"
    ) -> dict[str, WorkerGroup]: ...

    @abstractmethod
    def worker_group(
        self, pool: ResourcePool, classes: ClassWithInitArgs | Mapping[str, ClassWithInitArgs], name: str = "worker"
    ) -> WorkerGroup | dict[str, WorkerGroup]:
        """Start one process per place of the pool, and return a group: for several roles, one group for each role.

        Several roles share the processes. `name` names processes and logs, and is also the role of a single class.
        Raises WorkerError when a process does not start in time or a worker's `__init__` fails.
        """

    def worker_groups(
        self, requests: Sequence[ProcessRequest], *, meanwhile: Callable[[], None] = lambda: None
    ) -> list[dict[str, WorkerGroup]]:
        """Return the groups of several sets of processes, as from `worker_group`; the sets start at the same time.

        meanwhile: called once, while the processes start and before any worker is constructed; its errors pass.
        """
        meanwhile()
        return [self.worker_group(*request) for request in requests]

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers and release the resources that `start` took. A second call does nothing."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
