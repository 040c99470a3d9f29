"""The parts of a group: a ResourcePool of places for its processes, and the ClassWithInitArgs of its workers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from rlcore.errors import ConfigError
from rlcore.workers.worker import Worker


class ResourcePool:
    """Places for worker processes: `process_on_nodes=[8, 8]` means 8 processes on each of two nodes.

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
        self._first = 0

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return sum(self.process_on_nodes)

    @property
    def gpus_per_worker(self) -> float:
        """GPUs of each place."""
        return self._gpus_per_worker or 0.0

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Return this pool's places as pools of `sizes` places, in rank order, such as `split([1, 3])` of four places.

        Groups on different parts run at the same time; a group on the whole pool takes turns with them. Raises
        ConfigError for a size below 1, and for sizes that do not add up to the pool's.
        """
        if not sizes or any(type(size) is not int or size < 1 for size in sizes) or sum(sizes) != self.world_size:
            raise ConfigError(
                f"split({list(sizes)}): the sizes must be 1 or more and add up to the pool's {self.world_size} places, "
                f"as in split({[1] * self.world_size})."
            )
        parts, first = [], 0
        for size in sizes:
            # A shallow copy: the parts share the reservation, and so take turns with groups on the whole pool.
            part = copy.copy(self)
            part.process_on_nodes = self._cut(first, size)
            part._first = self._first + first
            parts.append(part)
            first += size
        return parts

    def on_cpu(self) -> Self:
        """Return a pool of the same places for processes without a GPU, which take no turns with the others."""
        part = copy.copy(self)
        part._gpus_per_worker = 0.0
        return part

    def _cut(self, first: int, size: int) -> tuple[int, ...]:
        """Return the number of places on each node, of the `size` places from `first` on."""
        counts, start = [], 0
        for count in self.process_on_nodes:
            on_node = min(start + count, first + size) - max(start, first)
            if on_node > 0:
                counts.append(on_node)
            start += count
        return tuple(counts)


class ClassWithInitArgs:
    """A worker class and the constructor arguments of every rank's worker.

    Takes a plain class or one decorated with `@ray.remote`. Raises ConfigError when it is not a Worker.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        plain = metadata.modified_class.__ray_actor_class__ if metadata is not None else cls
        if not (isinstance(plain, type) and issubclass(plain, Worker)):
            raise ConfigError(f"{plain!r} is not a subclass of rlcore.workers.Worker; make it one.")
        self.cls: type[Worker] = plain
        self.args = args
        self.kwargs = kwargs
