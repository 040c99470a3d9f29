"""The nodes of a Ray cluster, the demands of pools on them, and explanations of demands that cannot be met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node  # Ray's public API gives only the sum over all nodes

from rlcore.errors import did_you_mean

SHOWN_NODES = 16
"""Nodes that a message lists one by one."""
SHOWN_AMOUNTS = ("CPU", "GPU")
"""Resources that a message lists with their amounts; of others, which mark nodes, it lists the names."""
ROUNDING = 1e-9
"""Tolerance for sums of fractional resources."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster that is alive: its name and address, and its total and free resources."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def marks(self) -> list[str]:
        """The custom resources of the node, which pools can ask for."""
        own = ("memory", "object_store_memory", *SHOWN_AMOUNTS)
        kinds = (kind for kind in self.total if kind not in own)
        return sorted(kind for kind in kinds if not kind.startswith(("node:", "accelerator_type:")))


@dataclass(frozen=True)
class Demand:
    """A pool's demand: `process_on_nodes` places of the resources `bundle`.

    The places of an entry must be on one node unless `spread` is set. `node` is the resource, also in `bundle`, that
    marks the wanted nodes.
    """

    name: str
    process_on_nodes: tuple[int, ...]
    bundle: Mapping[str, float]
    spread: bool
    node: str | None

    @property
    def places(self) -> int:
        """Total number of places."""
        return sum(self.process_on_nodes)

    def total(self) -> Counter[str]:
        """Return the resources of all places together."""
        return Counter({kind: amount * self.places for kind, amount in self.bundle.items() if kind != self.node})

    def __str__(self) -> str:
        each = amounts({kind: amount for kind, amount in self.bundle.items() if kind != self.node})
        where = f" on nodes that have {self.node!r}" if self.node else ""
        counts = str(self.places) if len(self.process_on_nodes) == 1 else str(list(self.process_on_nodes))
        places = "1 place" if self.places == 1 else f"{counts} places"
        return f"{self.name} asks for {places} of {each}{where}"


def alive_nodes() -> list[Node]:
    """Return the nodes that are alive, sorted by name."""
    free = available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            nodes.append(Node(name, node["Resources"], free.get(node["NodeID"], {})))
    return sorted(nodes, key=lambda node: node.name)


def room(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return the number of places of `bundle` that fit into the resources."""
    return min(int(resources.get(kind, 0.0) / amount + ROUNDING) for kind, amount in bundle.items())


def why_impossible(demands: Sequence[Demand], nodes: Sequence[Node]) -> str | None:
    """Return the reason why these nodes can never hold all pools at one time, or None if they may."""
    for demand in demands:
        if why := _why_too_large(demand, nodes):
            return why
    if why := _why_too_many(demands, nodes, "the cluster has"):
        return why
    for mark in dict.fromkeys(demand.node for demand in demands if demand.node):
        marked = [node for node in nodes if mark in node.total]
        wanting = [demand for demand in demands if demand.node == mark]
        if why := _why_too_many(wanting, marked, f"the nodes with {mark!r} have", nodes):
            return why
    return None


def _why_too_large(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """Return the reason why these nodes can never hold the pool, even without other pools."""
    if demand.node is not None and not any(demand.node in node.total for node in nodes):
        marks = sorted(set().union(*(node.marks for node in nodes)))
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
    return None


def _why_too_many(
    demands: Sequence[Demand], nodes: Sequence[Node], where: str, shown: Sequence[Node] | None = None
) -> str | None:
    """Return the reason why the pools together need more than these nodes have, or None if they do not."""
    # A necessary condition only: Ray may still fail to fit the places on single nodes.
    need = sum((demand.total() for demand in demands), Counter[str]())
    for node in nodes:
        need.subtract({kind: node.total.get(kind, 0.0) for kind in need})
    lacking = {kind: amount for kind, amount in need.items() if amount > ROUNDING}
    if not lacking:
        return None
    return f"{'; '.join(map(str, demands))}; together {amounts(lacking)} more than {where}. {_table(shown or nodes)}"


def why_not_placed(demand: Demand, nodes: Sequence[Node]) -> str:
    """Return the reason why a pool got no places although the nodes could hold it."""
    rooms = sum(room(node.free, demand.bundle) for node in nodes)
    if rooms < demand.places:
        return f"{demand}; the free resources have room for {rooms}, others hold the rest. {_table(nodes, demand)}"
    return f"{demand}; there is room, but not together on one node, or Ray is slow. {_table(nodes, demand)}"


def _table(nodes: Sequence[Node], demand: Demand | None = None) -> str:
    """Return one line per node: its resources, and those that it lacks for one place of the pool."""
    lines = []
    for node in nodes[:SHOWN_NODES]:
        has = [f"{node.total.get(kind, 0.0):g} {kind} ({node.free.get(kind, 0.0):g} free)" for kind in SHOWN_AMOUNTS]
        line = f"    {node.name}: {', '.join([*has, *node.marks])}"
        if demand is not None:
            lacks = _lacks(node, demand)
            line += f"; lacks {lacks}" if lacks else f"; room for {room(node.free, demand.bundle)}"
        lines.append(line)
    if len(nodes) > SHOWN_NODES:
        lines.append(f"    and {len(nodes) - SHOWN_NODES} more nodes")
    return "\n".join(["The nodes:", *lines])


def _lacks(node: Node, demand: Demand) -> str:
    """Return the resources that a node lacks for one place of the pool, in words."""
    missing = {kind: amount - node.free.get(kind, 0.0) for kind, amount in demand.bundle.items()}
    missing = {kind: amount for kind, amount in missing.items() if amount > 0}
    by_amount = {kind: amount for kind, amount in missing.items() if kind != demand.node}
    words = [amounts(by_amount)] if by_amount else []
    if demand.node in missing:
        words.append(repr(demand.node))
    return " and ".join(words)


def amounts(resources: Mapping[str, float]) -> str:
    """Return resources in words, such as `2 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def ray_resources() -> str:
    """Return a sentence part for messages: Ray's nodes, and its total and free cores and GPUs."""
    total, free = ray.cluster_resources(), ray.available_resources()
    has = [f"{total.get(kind, 0.0):g} {kind} ({free.get(kind, 0.0):g} free)" for kind in SHOWN_AMOUNTS]
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"Ray has {' and '.join(has)} on {nodes} node{'s' if nodes != 1 else ''}"


def accelerators() -> tuple[dict[str, int], int]:
    """Return the number of GPUs of each kind, by the resource that names the kind, and the cores of all nodes."""
    kinds: Counter[str] = Counter()
    nodes = alive_nodes()
    for node in nodes:
        if gpus := int(node.total.get("GPU", 0)):
            marks = [kind for kind in node.total if kind.startswith("accelerator_type:")]
            kinds[marks[0] if marks else "a GPU of a kind unknown to Ray"] += gpus
    return dict(kinds), int(sum(node.total.get("CPU", 0) for node in nodes))
