"""Worker groups as verl's programs make them: directly on Ray, without an executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from rlcore.compat.dataproto import DataProto
from rlcore.errors import ConfigError, did_you_mean
from rlcore.workers import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from rlcore.workers.ray.pool import RayResourcePool
from rlcore.workers.ray.processes import RayProcesses

RayClassWithInitArgs = ClassWithInitArgs
"""verl's name of ClassWithInitArgs, which does not depend on the executor."""


def split_resource_pool(resource_pool: ResourcePool, split_size: int | Sequence[int]) -> list[ResourcePool]:
    """Return `resource_pool.split(split_size)`; with an integer, pools of that many slots each.

    Raises ConfigError for sizes that do not add up to the pool's.
    """
    if isinstance(split_size, int):
        pools = max(1, resource_pool.world_size // max(1, split_size))
        split_size = [split_size] * pools
    return resource_pool.split(split_size)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """Return the classes of several roles, by name, to be fused: one process per rank holds a worker of each role.

    Pass the result to RayWorkerGroup and call its `spawn(names)`. Raises ConfigError for no role.
    """
    if not class_dict:
        raise ConfigError("create_colocated_worker_cls needs at least one role: {'actor': ClassWithInitArgs(...)}.")
    return dict(class_dict)


class RankHandle:
    """The worker of one rank: `handle.method.remote(...)` calls any of its methods and returns Ray's reference."""

    def __init__(self, processes: RayProcesses, rank: int, role: str) -> None:
        self._processes = processes
        self._rank = rank
        self._role = role

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._processes.call, self._rank, self._role, method))


class RayWorkerGroup(WorkerGroup):
    """A worker group on the Ray cluster that this process is connected to. With fused classes, call `spawn`.

    The constructor starts the processes and waits up to `start_timeout` seconds for them. Raises ConfigError when the
    cluster can never hold the pool, WorkerError when a process does not start, or the error of a worker's `__init__`.
    """

    batch_class = DataProto

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs | Mapping[str, ClassWithInitArgs],
        *,
        name: str = "worker",
        log_dir: Path | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._classes: dict[str, ClassWithInitArgs] = {}
        own = Worker
        if isinstance(ray_cls_with_init, ClassWithInitArgs):
            self._classes[name], own = ray_cls_with_init, ray_cls_with_init.cls
        else:
            self._classes |= ray_cls_with_init
        processes = RayProcesses(resource_pool, self._classes, name, log_dir=log_dir, start_timeout=start_timeout)
        processes.wait_until_started()
        super().__init__(processes, name, own)
        self._ray_processes = processes

    @property
    def _workers(self) -> list[RankHandle]:
        return [RankHandle(self._ray_processes, rank, self.role) for rank in range(self.world_size)]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return a group for each named role, on the same processes; ConfigError for a role that was not fused."""
        groups = {}
        for role in prefix_set:
            if role not in self._classes:
                raise ConfigError(
                    f"spawn: no role {role!r}, only {list(self._classes)}.{did_you_mean(role, self._classes)}"
                )
            groups[role] = WorkerGroup(self._processes, role, self._classes[role].cls)
            groups[role].batch_class = DataProto
        return groups
