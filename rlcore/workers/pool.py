"""What a group is made of: a ResourcePool says where its processes run, a ClassWithInitArgs what runs in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.errors import ConfigError
from rlcore.workers.worker import Worker


class ResourcePool:
    """Places for worker processes: `process_on_nodes=[8, 8]` is 8 processes on each of two nodes.

    Groups on the same pool share its places and take turns; groups on different pools run at the same time.
    Raises ConfigError for a node without processes.
    """

    def __init__(self, process_on_nodes: Sequence[int], *, gpus_per_worker: float | None = 0.0) -> None:
        if not process_on_nodes or any(type(count) is not int or count < 1 for count in process_on_nodes):
            raise ConfigError(
                f"process_on_nodes={process_on_nodes!r} must list the number of processes on each node, such as [8, 8]."
            )
        self.process_on_nodes = tuple(process_on_nodes)
        self._gpus_per_worker = gpus_per_worker

    @property
    def world_size(self) -> int:
        """Processes on all nodes together."""
        return sum(self.process_on_nodes)

    @property
    def gpus_per_worker(self) -> float:
        """GPUs of each place."""
        return self._gpus_per_worker or 0.0


class ClassWithInitArgs:
    """A worker class and the arguments that every rank's worker is made with.

    Takes a plain class or one decorated with `@ray.remote`. Raises ConfigError when it is not a Worker.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        plain = metadata.modified_class.__ray_actor_class__ if metadata is not None else cls
        if not (isinstance(plain, type) and issubclass(plain, Worker)):
            raise ConfigError(f"{plain!r} is not a class derived from rlcore.workers.Worker; derive it.")
        self.cls: type[Worker] = plain
        self.args = args
        self.kwargs = kwargs


RayClassWithInitArgs = ClassWithInitArgs
"""The name that programs for verl use; the class does not depend on the executor."""


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """Return the classes of several roles, by name, to be fused: one process a rank, with a worker of each role in it.

    `spawn(names)` of a RayWorkerGroup of them gives one group for each role. Raises ConfigError when no role is given.
    """
    if not class_dict:
        raise ConfigError("create_colocated_worker_cls needs at least one role: {'actor': ClassWithInitArgs(...)}.")
    return dict(class_dict)
