"""Resource pools on a Ray cluster, backed by placement groups."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rlcore.errors import ConfigError, WorkerError
from rlcore.workers.pool import ResourcePool
from rlcore.workers.ray.nodes import Demand, alive_nodes, why_impossible, why_not_placed
from rlcore.workers.ray.session import RaySession

GROUPS_PER_PLACE = 10
"""Groups that can share one place if its workers use a GPU or a part of one."""
JOIN_SECONDS = 10.0
"""Seconds that a pool too large for the cluster waits for more nodes to join."""
SLIVER = 0.001
"""Amount of a node's marking resource that each place takes, so that an amount of 1 holds a thousand places."""
ADVICE = "Use fewer workers, fewer cpus_per_worker or gpus_per_worker, other nodes, or a larger cluster."


class Reservation:
    """The placement groups of a pool and its parts, and the last user of each place: a set of processes."""

    def __init__(self, start_timeout: float, join_seconds: float) -> None:
        self.groups: list[Any] = []
        self._session = RaySession()
        self._start_timeout = start_timeout
        self._join_seconds = min(join_seconds, start_timeout)
        self._with_gpu: Counter[int] = Counter()
        self._last: dict[int, tuple[Any, int]] = {}

    def make(self, demand: Demand, other_pools: Sequence[Demand]) -> None:
        """Wait for the places. ConfigError when the cluster can never hold all pools, WorkerError after a timeout."""
        if self.groups:
            self._session.check(f"{demand.name}: the pool")
            return
        self._session = RaySession()
        deadline = time.monotonic() + self._join_seconds
        # A cluster that grows may hold the pool soon; one that rlcore started never does.
        while (why := why_impossible([demand, *other_pools], alive_nodes())) is not None:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{why}\n{ADVICE}")
            time.sleep(0.2)
        strategy = "PACK" if demand.spread else "STRICT_PACK"
        self.groups = [placement_group([dict(demand.bundle)] * n, strategy=strategy) for n in demand.process_on_nodes]
        deadline = time.monotonic() + self._start_timeout
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in self.groups):
            why = why_not_placed(demand, alive_nodes())
            self.release()
            raise WorkerError(f"Ray found no room within {self._start_timeout:g} s: {why}\n{ADVICE}")

    def add_gpu_user(self, place: int, gpus: float) -> None:
        """Count one more process with a GPU on a place; ConfigError when Ray would never start it."""
        most = 1 if gpus > 1 else GROUPS_PER_PLACE
        if self._with_gpu[place] == most:
            raise ConfigError(
                f"a place of {gpus:g} GPUs holds at most {most} processes that use them, and one more should start "
                "there; fuse the roles into one process, or give each a pool of its own"
            )
        self._with_gpu[place] += 1

    def remove_gpu_user(self, place: int) -> None:
        """Count one process with a GPU less on a place."""
        self._with_gpu[place] -= 1

    def previous_user(self, place: int, user: Any) -> tuple[Any, int] | None:
        """Return the last user of a place and its rank there; None if that is `user` itself."""
        previous = self._last.get(place)
        return None if previous is None or previous[0] is user else previous

    def set_user(self, place: int, user: Any, rank: int) -> None:
        """Record the last user of a place, and its rank there."""
        self._last[place] = user, rank

    def release(self) -> None:
        """Release the places. A second call does nothing."""
        for group in self.groups if self._session.is_current else ():
            remove_placement_group(group)
        self.groups.clear()


class RayResourcePool(ResourcePool):
    """Places on Ray: `process_on_nodes=[8, 8]` asks for 8 places on one node and 8 places on another.

    Each place has `cpus_per_worker` cores and `gpus_per_worker` GPUs (None: one if the cluster has any), on nodes with
    the resource `node` (None: any node). The first group on the pool reserves the places and waits up to
    `start_timeout` seconds for them. It fails after `join_seconds` already if the cluster has no room for this pool
    and `other_pools`. `spread=True` allows the places of an entry on several nodes if they do not fit on one.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        cpus_per_worker: int = 1,
        gpus_per_worker: float | None = None,
        node: str | None = None,
        start_timeout: float = 120.0,
        join_seconds: float = JOIN_SECONDS,
        spread: bool = False,
        other_pools: Sequence[RayResourcePool] = (),
        name: str = "a pool",
    ) -> None:
        super().__init__(process_on_nodes, gpus_per_worker=gpus_per_worker)
        self.cpus_per_worker = cpus_per_worker
        self._whole = self
        self._node = node
        self._spread = spread
        self._other_pools = other_pools
        self._name = name
        self._takes_turns = True
        self._reservation = Reservation(start_timeout, join_seconds)

    @property
    def gpus_per_worker(self) -> float:
        """GPUs of each place."""
        if self._gpus_per_worker is None:
            self._gpus_per_worker = 1.0 if ray.cluster_resources().get("GPU", 0) > 0 else 0.0
        return self._gpus_per_worker

    def demand(self) -> Demand:
        """Return the whole pool's demand on the cluster."""
        bundle = {"CPU": float(self.cpus_per_worker), "GPU": self._whole.gpus_per_worker}
        if self._node is not None:
            bundle[self._node] = SLIVER
        bundle = {kind: amount for kind, amount in bundle.items() if amount > 0}
        return Demand(self._name, self._whole.process_on_nodes, bundle, self._spread, self._node)

    def actor_options(self) -> list[dict[str, Any]]:
        """Reserve the places, and return for each rank the options that put an actor on its place.

        Raises ConfigError when the cluster can never provide them, WorkerError when it does not in time.
        """
        self._reservation.make(self.demand(), [pool.demand() for pool in self._other_pools if pool is not self._whole])
        gpus = self.gpus_per_worker
        # The place holds the resources. Its processes ask for a small share each, so that several fit; Ray
        # divides single GPUs only.
        share = {"num_cpus": 0, "num_gpus": gpus if gpus > 1 else gpus / GROUPS_PER_PLACE}
        bundles: list[tuple[Any, int]] = []
        for group in self._reservation.groups:
            bundles += [(group, index) for index in range(group.bundle_count)]
        places = range(self._first, self._first + self.world_size)
        for place in places:
            if gpus > 0:
                self._reservation.add_gpu_user(place, gpus)
        return [
            share
            | {
                "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=bundles[place][0], placement_group_bundle_index=bundles[place][1]
                )
            }
            for place in places
        ]

    def previous_user(self, user: Any, rank: int) -> tuple[Any, int] | None:
        """Return the other processes with the last call on a rank's place, and their rank there; None without turns."""
        return self._reservation.previous_user(self._first + rank, user) if self._takes_turns else None

    def set_user(self, user: Any, rank: int) -> None:
        """Record that the processes `user` have the last call on a rank's place."""
        self._reservation.set_user(self._first + rank, user, rank)

    def leave(self) -> None:
        """Record that the processes started with `actor_options` have ended."""
        if self.gpus_per_worker > 0:
            for place in range(self._first, self._first + self.world_size):
                self._reservation.remove_gpu_user(place)

    def on_cpu(self) -> Self:
        """Return a pool of the same places for processes without a GPU, which take no turns with the others."""
        part = super().on_cpu()
        part._takes_turns = False
        return part

    def release(self) -> None:
        """Release the places of the whole pool. A second call does nothing."""
        self._reservation.release()
