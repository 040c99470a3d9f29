"""What the nodes of a Ray cluster have, what pools ask of them, and in words why it is not enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node  # Ray's public API gives the sum over all nodes alone

from rlcore.errors import did_you_mean

SHOWN_NODES = 16
"""Nodes that a message lists one by one."""
SHOWN_AMOUNTS = ("CPU", "GPU")
"""Resources that a message gives for each node with their amounts; of others, which mark nodes, it gives the names."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster that is alive: its name and address, and its resources, in all and free."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def marks(self) -> list[str]:
        """The resources that somebody gave the node, for pools to ask for."""
        own = ("memory", "object_store_memory", *SHOWN_AMOUNTS)
        kinds = (kind for kind in self.total if kind not in own)
        return sorted(kind for kind in kinds if not kind.startswith(("node:", "accelerator_type:")))


@dataclass(frozen=True)
class Demand:
    """What a pool asks for: `process_on_nodes` places of `bundle`, each entry on one node unless it may `spread`.

    `node` is the resource, also in `bundle`, that marks the nodes it wants.
    """

    name: str
    process_on_nodes: tuple[int, ...]
    bundle: Mapping[str, float]
    spread: bool
    node: str | None

    @property
    def places(self) -> int:
        """Places in all."""
        return sum(self.process_on_nodes)

    def total(self) -> Counter[str]:
        """Return what all places need together."""
        return Counter({kind: amount * self.places for kind, amount in self.bundle.items() if kind != self.node})

    def __str__(self) -> str:
        each = amounts({kind: amount for kind, amount in self.bundle.items() if kind != self.node})
        where = f" on nodes that have {self.node!r}" if self.node else ""
        counts = str(self.places) if len(self.process_on_nodes) == 1 else str(list(self.process_on_nodes))
        places = "1 place" if self.places == 1 else f"{counts} places"
        return f"{self.name} asks for {places} of {each}{where}"


def alive_nodes() -> list[Node]:
    """Return the nodes that are alive, by name."""
    free = available_resources_per_node()
    return sorted(
        (
            Node(
                f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
                node["Resources"],
                free.get(node["NodeID"], {}),
            )
            for node in ray.nodes()
            if node["Alive"]
        ),
        key=lambda node: node.name,
    )


def room(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many places of `bundle` the resources hold."""
    return min(int(resources.get(kind, 0.0) / amount + 1e-9) for kind, amount in bundle.items())


def impossible(demands: Sequence[Demand], nodes: Sequence[Node]) -> str | None:
    """Return why these nodes can never hold all the pools at one time, or None where they may."""
    for demand in demands:
        if demand.node is not None and not any(demand.node in node.total for node in nodes):
            marks = sorted({mark for node in nodes for mark in node.marks})
            return (
                f"{demand}, and no node has it.{did_you_mean(demand.node, marks)} Start Ray there with "
                f"--resources='{{\"{demand.node}\": 1}}', or name a node by its address, as node:10.0.0.2. "
                f"{_table(nodes, demand)}"
            )
        rooms = [room(node.total, demand.bundle) for node in nodes]
        most = max(demand.process_on_nodes)
        if not demand.spread and max(rooms) < most:
            return f"{demand}, and no node has room for {most}. {_table(nodes, demand)}"
        if sum(rooms) < demand.places:
            return f"{demand}, and the nodes have room for {sum(rooms)}. {_table(nodes, demand)}"
    for mark in (None, *dict.fromkeys(demand.node for demand in demands if demand.node)):
        asked = [demand for demand in demands if mark in (None, demand.node)]
        need = sum((demand.total() for demand in asked), Counter[str]())
        there = [node for node in nodes if mark is None or mark in node.total]
        lacking = {kind: amount - sum(node.total.get(kind, 0.0) for node in there) for kind, amount in need.items()}
        if lacking := {kind: amount for kind, amount in lacking.items() if amount > 1e-9}:
            where = "the cluster" if mark is None else f"what the nodes with {mark!r} have"
            return f"{'; '.join(map(str, asked))}; together {amounts(lacking)} more than {where}. {_table(nodes)}"
    return None


def waited_in_vain(demand: Demand, nodes: Sequence[Node]) -> str:
    """Return what hinders a pool that the nodes could hold if nobody else used them."""
    rooms = sum(room(node.free, demand.bundle) for node in nodes)
    return (
        f"{demand}; what is free has room for {rooms}, others hold too much of the rest. {_table(nodes, demand)}"
        if rooms < demand.places
        else f"{demand}; there is room, but not together on one node, or Ray is slow. {_table(nodes, demand)}"
    )


def _table(nodes: Sequence[Node], demand: Demand | None = None) -> str:
    """Return a line for each node: what it has, and what it lacks for one place of the pool."""
    lines = []
    for node in nodes[:SHOWN_NODES]:
        has = [f"{node.total.get(kind, 0.0):g} {kind} ({node.free.get(kind, 0.0):g} free)" for kind in SHOWN_AMOUNTS]
        line = f"    {node.name}: {', '.join([*has, *node.marks])}"
        if demand is not None:
            lacking = {
                kind: amount - node.free.get(kind, 0.0)
                for kind, amount in demand.bundle.items()
                if amount > node.free.get(kind, 0.0)
            }
            by_amount = {kind: amount for kind, amount in lacking.items() if kind != demand.node}
            words = [
                *([amounts(by_amount)] if by_amount else []),
                *([repr(demand.node)] if demand.node in lacking else []),
            ]
            line += f"; lacks {' and '.join(words)}" if words else f"; room for {room(node.free, demand.bundle)}"
        lines.append(line)
    if len(nodes) > SHOWN_NODES:
        lines.append(f"    and {len(nodes) - SHOWN_NODES} nodes more")
    return "\n".join(["The nodes:", *lines])


def amounts(resources: Mapping[str, float]) -> str:
    """Return resources in words, such as `2 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def what_ray_has() -> str:
    """Return Ray's nodes, cores and GPUs, in all and free, as part of a message."""
    total, free = ray.cluster_resources(), ray.available_resources()
    has = [f"{total.get(kind, 0.0):g} {kind} ({free.get(kind, 0.0):g} free)" for kind in SHOWN_AMOUNTS]
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"Ray has {' and '.join(has)} on {nodes} node{'s' if nodes != 1 else ''}"


def accelerators() -> tuple[dict[str, int], int]:
    """Return the GPUs of the nodes that are alive by the resource that names their kind, and the cores of all nodes."""
    kinds: Counter[str] = Counter()
    nodes = alive_nodes()
    for node in nodes:
        if gpus := int(node.total.get("GPU", 0)):
            marks = [kind for kind in node.total if kind.startswith("accelerator_type:")]
            kinds[marks[0] if marks else "a GPU of a kind that Ray does not know"] += gpus
    return dict(kinds), int(sum(node.total.get("CPU", 0) for node in nodes))
