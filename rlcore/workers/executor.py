"""Executors: where worker processes run. Ray, or everything in this process, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
"""The environment that bounds how many compiled kernels oneDNN and torch keep, where the user has not said it.

In bf16 on the CPU they compile one for each shape, of up to a MiB, and keep 1,024 by themselves; few shapes come twice
where every micro-batch has lengths of its own (benchmarks/NOTES.md).
"""


class Executor(ABC):
    """Starts worker processes in pools and gives out the groups that call them. A context manager: start, shutdown."""

    @abstractmethod
    def start(self) -> None:
        """Get ready to start workers. Raises WorkerError when the cluster cannot be reached or started in time."""

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
        """Return places for `workers` processes; what is None comes from the cluster's config.

        `node` is a resource of Ray that their nodes have to have, None any node; messages call the pool `name`.
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
        """Start one process for each place of the pool and return the group, or a group for each of several roles.

        Several roles share the processes. `name` names processes and logs; with one class it is the role, too.
        Raises WorkerError when a process does not start in time or a worker's `__init__` fails.
        """

    def worker_groups(self, requests: Sequence[ProcessRequest]) -> list[dict[str, WorkerGroup]]:
        """Return what `worker_group` does for each of several sets of processes, which start at the same time."""
        return [self.worker_group(*request) for request in requests]

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers and give back what `start` took. Does nothing the second time."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
