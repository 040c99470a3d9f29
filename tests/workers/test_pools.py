"""Pools of places: their parts, what a cluster lacks for them, and who runs at the same time as whom."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, WorkerError
from rlcore.workers import (
    ClassWithInitArgs,
    Dispatch,
    Executor,
    Future,
    ResourcePool,
    Worker,
    make_executor,
    register,
)
from rlcore.workers.ray.nodes import Demand, Node, why_impossible, why_not_placed
from rlcore.workers.ray.pool import Reservation

# Parts of a pool


def test_a_split_pool_keeps_the_places_in_order() -> None:
    """Five places on two nodes, two and three, cut after the first: one on the first node, and one and three."""
    pool = ResourcePool([2, 3], gpus_per_worker=1.0)
    first, rest = pool.split([1, 4])
    assert (first.process_on_nodes, rest.process_on_nodes) == ((1,), (1, 3))
    assert [part.process_on_nodes for part in rest.split([2, 2])] == [(1, 1), (2,)]
    assert (pool.world_size, rest.gpus_per_worker, rest.on_cpu().gpus_per_worker) == (5, 1.0, 0.0)


@pytest.mark.parametrize("sizes", [[], [1, 2], [4, 1], [0, 4], [1.0, 3.0]])
def test_sizes_that_do_not_add_up(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"the sizes must be 1 or more and add up to the pool's 4 places, as in"):
        ResourcePool([4]).split(sizes)


# What a cluster lacks


def node(name: str, free: float = 1.0, **total: float) -> Node:
    return Node(name, total, {kind: amount * free for kind, amount in total.items()})


def demand(
    *places: int, cpus: float = 1, gpus: float = 0, mark: str | None = None, spread: bool = True, name: str = "main"
) -> Demand:
    bundle = {"CPU": cpus, "GPU": gpus, **({mark: 0.001} if mark else {})}
    return Demand(name, places, {kind: amount for kind, amount in bundle.items() if amount}, spread, mark)


EAST, WEST = node("a (10.0.0.1)", CPU=4, GPU=0), node("b (10.0.0.2)", CPU=8, GPU=2, west=1)


@pytest.mark.parametrize(
    ("demands", "why"),
    [
        ([demand(12)], None),
        ([demand(8), demand(4, mark="west")], None),
        ([demand(13)], "main asks for 13 places of 1 CPU, and the nodes have room for 12. The nodes:\n    a (10"),
        ([demand(3, gpus=1)], "main asks for 3 places of 1 CPU and 1 GPU, and the nodes have room for 2."),
        ([demand(4, 4, spread=False)], None),
        ([demand(9, spread=False)], "main asks for 9 places of 1 CPU, and no node has room for 9."),
        ([demand(1, mark="wets")], "'wets', and no node has it. Did you mean 'west'? Start Ray there with --reso"),
        ([demand(9, mark="west")], "main asks for 9 places of 1 CPU on nodes that have 'west', and the nodes have"),
        ([demand(8), demand(5, name="side")], "main asks for 8 places of 1 CPU; side asks for 5 places of 1 CPU; "),
        ([demand(6, mark="west"), demand(3, mark="west", name="side")], "1 CPU more than the nodes with 'west'"),
    ],
)
def test_what_a_cluster_can_never_hold(demands: list[Demand], why: str | None) -> None:
    found = why_impossible(demands, [EAST, WEST])
    assert found is None if why is None else found is not None and why in found, found


def test_every_node_is_shown_with_what_it_lacks() -> None:
    found = why_impossible([demand(3, cpus=2, gpus=1, mark="west")], [EAST, WEST])
    assert found is not None
    assert found.splitlines()[1:] == [
        "    a (10.0.0.1): 4 CPU (4 free), 0 GPU (0 free); lacks 1 GPU and 'west'",
        "    b (10.0.0.2): 8 CPU (8 free), 2 GPU (2 free), west; room for 2",
    ]
    busy = node("b (10.0.0.2)", 0.125, CPU=8, GPU=2)
    assert why_not_placed(demand(2, cpus=2), [busy]).splitlines() == [
        "main asks for 2 places of 2 CPU; the free resources have room for 0, others hold the rest. The nodes:",
        "    b (10.0.0.2): 8 CPU (1 free), 2 GPU (0.25 free); lacks 1 CPU",
    ]
    many = why_impossible([demand(99)], [node(f"n{at}", CPU=1) for at in range(20)])
    assert many is not None
    assert many.splitlines()[-1] == "    and 4 more nodes"


@pytest.mark.parametrize(("gpus", "most"), [(0.5, 10), (1.0, 10), (2.0, 1)])
def test_ray_cannot_share_places_of_several_gpus(gpus: float, most: int) -> None:
    reservation = Reservation(start_timeout=1.0, join_seconds=0.0)
    for _ in range(most):
        reservation.add_gpu_user(0, gpus)
    with pytest.raises(ConfigError, match=f"a place of {gpus:g} GPUs holds at most {most} processes that use them"):
        reservation.add_gpu_user(0, gpus)
    reservation.add_gpu_user(1, gpus)


# Who runs at the same time


class Clocked(Worker):
    """Says when it was at work. `CLOCK_MONOTONIC` is one clock for all processes of a machine."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def work(self, seconds: float) -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(seconds)
        return start, time.monotonic()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def lose_rank_one(self) -> None:
        if self.rank == 1:
            os._exit(3)
        time.sleep(60)


@pytest.fixture
def executor(ray_cluster: None) -> Iterator[Executor]:
    cluster = ClusterConfig(executor="ray")
    with make_executor(cluster, by_value_modules=[sys.modules[__name__]]) as made:
        yield made


def overlap(*spans: tuple[float, float]) -> float:
    """Return for how many seconds all were at work together; less than 0 is how long they were apart."""
    return min(end for _, end in spans) - max(start for start, _ in spans)


@pytest.mark.ray
def test_processes_on_the_same_places_take_turns_in_the_order_of_the_calls_and_pools_overlap(
    executor: Executor,
) -> None:
    """`actor` is on two places, `ref` on the first and `critic` on the second of them, `other` elsewhere."""
    main, side = executor.resource_pool(2), executor.resource_pool(1)
    first, second = main.split([1, 1])
    actor, ref, critic, other = (
        executor.worker_group(pool, ClassWithInitArgs(Clocked), name=name)
        for pool, name in ((main, "actor"), (first, "ref"), (second, "critic"), (side, "other"))
    )
    start = time.monotonic()
    calls: list[Future] = [group.work(0.4) for group in (actor, ref, critic, actor, actor, ref, other)]
    assert time.monotonic() - start < 0.4, "the controller waits for none of them"
    before, by_ref, by_critic, after, again, last, elsewhere = (call.get() for call in calls)
    for spans in (
        [before[0], by_ref[0], after[0], again[0], last[0]],
        [before[1], by_critic[0], after[1], again[1]],
    ):
        assert [overlap(*pair) < 0 for pair in pairwise(spans)] == [True] * (len(spans) - 1)
        assert spans == sorted(spans)
    assert overlap(by_ref[0], by_critic[0]) > 0.1, "parts of a pool are pools of their own"
    assert overlap(before[0], elsewhere[0]) > 0.1

    actor.lose_rank_one()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"actor rank 1 of 2 on .* died during lose_rank_one\(\): "):
        ref.work(0.1).get()  # its turn comes after that of the actor's rank 0, which is asleep
    assert time.monotonic() - start < 30
