"""Worker groups: many worker processes driven by one controller, on Ray or in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcore.workers.dispatch import Dispatch, Execute, Mesh
from rlcore.workers.executor import Executor, make_executor
from rlcore.workers.group import Future, WorkerGroup, wait_for
from rlcore.workers.pool import (
    ClassWithInitArgs,
    RayClassWithInitArgs,
    ResourcePool,
    create_colocated_worker_cls,
    split_resource_pool,
)
from rlcore.workers.spans import Span
from rlcore.workers.worker import Worker, WorkerContext, register

if TYPE_CHECKING:
    from rlcore.workers.ray_group import RayWorkerGroup
    from rlcore.workers.ray_pool import RayResourcePool

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "Executor",
    "Future",
    "Mesh",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "Span",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_executor",
    "register",
    "split_resource_pool",
    "wait_for",
]


def __getattr__(name: str) -> Any:
    """Import the two names that need ray, which may not be installed, when they are first used."""
    if name == "RayResourcePool":
        from rlcore.workers.ray_pool import RayResourcePool

        return RayResourcePool
    if name == "RayWorkerGroup":
        from rlcore.workers.ray_group import RayWorkerGroup

        return RayWorkerGroup
    raise AttributeError(f"module 'rlcore.workers' has no attribute {name!r}")
