"""Worker groups: many workers driven by one controller, in processes on Ray or all inside this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcore.workers.choose_executor import make_executor
from rlcore.workers.dispatch import Dispatch, Execute
from rlcore.workers.executor import Executor
from rlcore.workers.future import Future, wait_for
from rlcore.workers.group import WorkerGroup
from rlcore.workers.mesh import Mesh
from rlcore.workers.pool import ClassWithInitArgs, ResourcePool
from rlcore.workers.spans import Span
from rlcore.workers.worker import Worker, WorkerContext, register

if TYPE_CHECKING:
    from rlcore.workers.ray.pool import RayResourcePool

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "Executor",
    "Future",
    "Mesh",
    "RayResourcePool",
    "ResourcePool",
    "Span",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "make_executor",
    "register",
    "wait_for",
]


def __getattr__(name: str) -> Any:
    """Import RayResourcePool at its first use: it imports ray, which takes seconds."""
    if name == "RayResourcePool":
        from rlcore.workers.ray.pool import RayResourcePool

        return RayResourcePool
    raise AttributeError(f"module 'rlcore.workers' has no attribute {name!r}")
