"""A plan as the values of config keys, and as the words of a command line."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from rlcore import Config
from rlcore.planning import ROLLOUT, changed_values
from rlcore_plugin_plan import memory
from rlcore_plugin_plan.search import Plan


def pool_names(plan: Plan) -> list[str]:
    """Return a name for each pool: `main`, or of several pools the first role of each."""
    if len(plan.pools) == 1:
        return ["main"]
    return [f"{pool.parts[0].role}_pool" for pool in plan.pools]


def values(plan: Plan, config: Config) -> dict[str, Any]:
    """Return the values, by dotted key, with which `rlcore train` runs the plan."""
    pools: dict[str, Any] = {}
    for name, pool in zip(pool_names(plan), plan.pools, strict=True):
        profile = plan.problem.devices[pool.kind].profile
        pools[name] = {"roles": [part.role for part in pool.parts], "workers": pool.count}
        if not profile.cpu:
            pools[name]["gpus_per_worker"] = 1
        if profile.node is not None and len(plan.problem.devices) > 1:
            pools[name]["node"] = profile.node
    parts = [part for pool in plan.pools for part in pool.parts]
    found: dict[str, Any] = {"cluster.pools": pools}
    layouts = {p.role: [p.layout.pp, p.layout.tp] for p in parts if p.role != ROLLOUT}
    same = next(iter(layouts.values()))
    if all(layout == same for layout in layouts.values()):
        found |= {"engine.pp": same[0], "engine.tp": same[1], "engine.layouts": {}}
    else:
        found |= {"engine.pp": 1, "engine.tp": 1}
        found["engine.layouts"] = {role: layout for role, layout in layouts.items() if layout != [1, 1]}
    rollout = plan.problem.rollout
    for part in parts:
        if part.generation is not None:
            found["rollout.tp"] = part.generation.tp
            if rollout.slots_key is not None:
                found[rollout.slots_key] = part.slots
            if rollout.cache_key is not None:
                row = memory.cache_bytes(plan.problem.sizes[part.role], part.generation, plan.problem.work)
                found[rollout.cache_key] = math.ceil(part.slots * row / 2**20)
    if config.engine.dp:
        found["engine.dp"] = 0
    return {key: value for key, value in found.items() if config.value(key) != value}


def words(found: Mapping[str, Any]) -> str:
    """Return values as the overrides of a command line, quoted for a shell."""
    return " ".join(shlex.quote(f"{key}={_written(value)}") for key, value in found.items())


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str) and not value.isidentifier():
        return json.dumps(value)
    return str(value)


def experiment(plan: Plan, config: Config) -> dict[str, Any]:
    """Return the content of an experiment file: the algorithm, the config's changes of the defaults, and the plan."""
    changed = changed_values(config)
    changed.pop("plan", None)  # the devices of this plan are no part of a run
    content: dict[str, Any] = {"defaults": [{"override /algo": config.algorithm}], **changed}
    for key, value in values(plan, config).items():
        *path, name = key.split(".")
        holder = content
        for part in path:
            holder = holder.setdefault(part, {})
        holder[name] = value
    return content
