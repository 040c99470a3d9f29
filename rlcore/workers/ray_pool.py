"""Places on a Ray cluster: a resource pool backed by placement groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rlcore.errors import WorkerError
from rlcore.workers.pool import ResourcePool

GROUPS_PER_PLACE = 10
"""Groups that can share one place when its workers have a GPU or a part of one."""


class RayResourcePool(ResourcePool):
    """Places on Ray: `process_on_nodes=[8, 8]` asks for two nodes' worth of 8 processes, each kept on one node.

    Each place has `cpus_per_worker` cores and `gpus_per_worker` GPUs (None: one where the cluster has any). They are
    reserved when the first group is put there, which waits up to `start_timeout` seconds. `spread=True` lets the
    processes of an entry lie on several nodes where they do not fit on one.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        cpus_per_worker: int = 1,
        gpus_per_worker: float | None = None,
        start_timeout: float = 120.0,
        spread: bool = False,
    ) -> None:
        super().__init__(process_on_nodes, gpus_per_worker=gpus_per_worker)
        self.cpus_per_worker = cpus_per_worker
        self._start_timeout = start_timeout
        self._strategy = "PACK" if spread else "STRICT_PACK"
        self._groups: list[Any] = []

    @property
    def gpus_per_worker(self) -> float:
        """GPUs of each place."""
        if self._gpus_per_worker is None:
            self._gpus_per_worker = 1.0 if ray.cluster_resources().get("GPU", 0) > 0 else 0.0
        return self._gpus_per_worker

    def actor_options(self) -> list[dict[str, Any]]:
        """Return, for each rank, the options that put an actor on its place; reserves the places first.

        Raises WorkerError when Ray cannot provide them in time.
        """
        self._reserve()
        gpus = self.gpus_per_worker
        share = {"num_cpus": 0, "num_gpus": gpus if gpus > 1 else gpus / GROUPS_PER_PLACE}
        bundles = [(group, index) for group in self._groups for index in range(group.bundle_count)]
        return [
            share
            | {
                "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                )
            }
            for group, index in bundles
        ]

    def release(self) -> None:
        """Give the places back. Does nothing the second time."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()

    def _reserve(self) -> None:
        if self._groups:
            return
        bundle = {"CPU": float(self.cpus_per_worker), "GPU": self.gpus_per_worker}
        bundle = {kind: amount for kind, amount in bundle.items() if amount > 0}
        self._groups = [placement_group([bundle] * n, strategy=self._strategy) for n in self.process_on_nodes]
        deadline = time.monotonic() + self._start_timeout
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in self._groups):
            message = self._shortage(bundle)
            self.release()
            raise WorkerError(message)

    def _shortage(self, bundle: dict[str, float]) -> str:
        need = {kind: amount * self.world_size for kind, amount in bundle.items()}
        total = ray.cluster_resources()
        lacking = {kind: amount - total.get(kind, 0.0) for kind, amount in need.items()}
        lacking = {kind: amount for kind, amount in lacking.items() if amount > 0}
        missing = f"missing: {amounts(lacking)}" if lacking else "others hold too much of it, or no one node has room"
        return (
            f"Ray found no place for {self.world_size} workers within {self._start_timeout:g} s. Waited for "
            f"{amounts(need)}, as {list(self.process_on_nodes)} processes of {amounts(bundle)} each; {what_ray_has()}; "
            f"{missing}. Use fewer workers (cluster.workers), fewer cluster.cpus_per_worker or gpus_per_worker, or a "
            "larger cluster."
        )


def what_ray_has() -> str:
    """Return Ray's nodes, cores and GPUs, in all and free, as part of a message."""
    total, free = ray.cluster_resources(), ray.available_resources()
    has = [f"{total.get(kind, 0.0):g} {kind} ({free.get(kind, 0.0):g} free)" for kind in ("CPU", "GPU")]
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"Ray has {' and '.join(has)} on {nodes} node{'s' if nodes != 1 else ''}"


def amounts(resources: dict[str, float]) -> str:
    """Return resources in words, such as `2 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
