"""A plan as values of config keys, and as overrides of a command line."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rlcore import Config
from rlcore.engine import GenerationLayout
from rlcore.planning import ROLLOUT, changed_values
from rlcore_plugin_plan import memory
from rlcore_plugin_plan.options import Part
from rlcore_plugin_plan.search import Plan


def pool_names(plan: Plan) -> list[str]:
    """Return a name for each pool: `main` for a single pool, else ROLE_pool with the pool's first role."""
    if len(plan.pools) == 1:
        return ["main"]
    return [f"{pool.parts[0].role}_pool" for pool in plan.pools]


def values(plan: Plan, config: Config) -> dict[str, Any]:
    """Return the config values, by dotted key, that make `rlcore train` run the plan; unchanged values are left out."""
    parts = list(chain.from_iterable(pool.parts for pool in plan.pools))
    found = {"cluster.pools": _pools(plan), **_layouts(parts)}
    for part in parts:
        if part.generation is not None:
            found |= _generation(part, part.generation, plan)
    return {key: value for key, value in found.items() if config.value(key) != value}


def _pools(plan: Plan) -> dict[str, Any]:
    pools: dict[str, Any] = {}
    for name, pool in zip(pool_names(plan), plan.pools, strict=True):
        profile = plan.problem.devices[pool.kind].profile
        pools[name] = {"roles": [part.role for part in pool.parts], "workers": pool.count}
        if not profile.cpu:
            pools[name]["gpus_per_worker"] = 1
        if profile.node is not None and len(plan.problem.devices) > 1:
            pools[name]["node"] = profile.node
    return pools


def _layouts(parts: Sequence[Part]) -> dict[str, Any]:
    layouts = {part.role: [part.layout.pp, part.layout.tp] for part in parts if part.role != ROLLOUT}
    same = next(iter(layouts.values()))
    if all(layout == same for layout in layouts.values()):
        return {"engine.pp": same[0], "engine.tp": same[1], "engine.layouts": {}}
    own = {role: layout for role, layout in layouts.items() if layout != [1, 1]}
    return {"engine.pp": 1, "engine.tp": 1, "engine.layouts": own}


def _generation(part: Part, layout: GenerationLayout, plan: Plan) -> dict[str, Any]:
    problem, engine = plan.problem, plan.problem.rollout_of(part.role)
    given = problem.fixed.generation_tp.get(part.role)
    found: dict[str, Any] = {} if given == layout.tp else {"rollout.tp": layout.tp}
    if engine.slots_key is not None:
        found[engine.slots_key] = part.slots
    if engine.cache_key is not None:
        row = memory.cache_bytes(problem.sizes[part.role], layout, problem.work_of(part.role))
        found[engine.cache_key] = math.ceil(part.slots * row / 2**20)
    return found


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
    """Return the content of an experiment file: the algorithm, the config's changed values, and the plan."""
    changed = changed_values(config)
    changed.pop("plan", None)  # a run does not need the planned devices
    content: dict[str, Any] = {"defaults": [{"override /algo": config.algorithm}], **changed}
    for key, value in values(plan, config).items():
        *path, name = key.split(".")
        holder = content
        for part in path:
            holder = holder.setdefault(part, {})
        holder[name] = value
    return content
