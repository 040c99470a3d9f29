"""A plan for people and for programs: the table, the runners-up, the picture of a step, JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rlcore import Config
from rlcore_plugin_plan.options import UNITS, Option, Part
from rlcore_plugin_plan.overrides import pool_names, values, words
from rlcore_plugin_plan.search import Plan

WIDTH = 72
"""Characters of the picture of a step."""
RUNNERS_UP = 4


def text(plans: Sequence[Plan], config: Config, given: Sequence[str]) -> str:
    """Return the best plan in full, a line for each of the next ones, and the command that runs the best.

    given: the overrides of the command line, which the command repeats.
    """
    best = plans[0]
    devices = " + ".join(map(str, best.problem.devices))
    work = best.problem.work
    lines = [
        f"{config.algorithm} on {devices}: {work.prompts} prompts a step of {work.lengths.prompt} tokens, responses of "
        f"{work.lengths.response:g}",
        "",
        f"a step takes {seconds(best.seconds)}, {best.tokens_per_second:,.0f} tokens/s, "
        f"{best.seconds * best.dollars_an_hour / 3600:.2f} dollars",
        "",
        *_table(best),
        "",
        *picture(best),
        "",
        *_runners_up(plans),
        "",
        "run it:",
        f"  rlcore train {shlex.join(given)}{' ' if given else ''}{words(values(best, config))}",
    ]
    return "\n".join(lines)


def seconds(value: float) -> str:
    """Return a time with three digits."""
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _table(plan: Plan) -> list[str]:
    header = ["role", "pool", "devices", "p-t-d", "p_g-t_g", "rows at once", "memory", *plan.problem.stage_names]
    rows = []
    for name, pool in zip(pool_names(plan), plan.pools, strict=True):
        rows += [[part.role, name, *_cells(part, pool, plan)] for part in pool.parts]
    rows.append(["the step", *[""] * 6, *(seconds(value) for value in plan.stages)])
    return aligned([header, *rows])


def _cells(part: Part, pool: Option, plan: Plan) -> list[str]:
    profile = plan.problem.devices[pool.kind].profile
    layout, replicas = part.layout, part.generation
    held = pool.held / UNITS * profile.memory * profile.usable
    return [
        f"{pool.count} {profile.name}",
        f"{layout.pp}-{layout.tp}-{layout.dp}",
        "" if replicas is None else f"{replicas.pp}-{replicas.tp}",
        str(part.slots) if part.slots else "",
        f"{held / 1e9:.1f} of {profile.memory / 1e9:.0f} GB",
        *("" if value == 0 else seconds(value) for value in part.stages),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return lines


def picture(plan: Plan) -> list[str]:
    """Return the step as a line for each pool, from left to right in time; dots are idle devices."""
    total = sum(plan.stages)
    wide = max(len(name) for name in pool_names(plan))
    lines = []
    marks = _marks(plan)
    for name, pool in zip(pool_names(plan), plan.pools, strict=True):
        line = ""
        for number, stage in enumerate(plan.stages):
            room = round(WIDTH * stage / total)
            drawn = "".join(
                marks[part.role] * round(WIDTH * part.stages[number] / total)
                for part in pool.parts
                if part.stages[number]
            )
            line += drawn[:room].ljust(room, ".") + "|"
        lines.append(f"{name.ljust(wide)} |{line}")
    names = ", ".join(f"{mark} {role}" for role, mark in marks.items())
    stages = " | ".join(plan.problem.stage_names)
    beside = "; sampling ahead runs beside the rest" if plan.problem.ahead else ""
    return [f"{''.ljust(wide)}  {stages}{beside}", *lines, f"{''.ljust(wide)}  {names}, . waits"]


def _marks(plan: Plan) -> dict[str, str]:
    """Return a letter for each role: the first of its letters that no earlier role has."""
    marks: dict[str, str] = {}
    for role in plan.problem.roles:
        letters = [*role.upper(), *"0123456789"]
        marks[role] = next(letter for letter in letters if letter.isalnum() and letter not in marks.values())
    return marks


def _runners_up(plans: Sequence[Plan]) -> list[str]:
    best = plans[0]
    rows = [["placement", "devices", "a step", "more than the best"]]
    for plan in plans[: RUNNERS_UP + 1]:
        where = " | ".join(", ".join(pool.roles) for pool in plan.pools)
        sizes = " | ".join(str(pool.count) for pool in plan.pools)
        rows.append([where, sizes, seconds(plan.seconds), f"{plan.objective / best.objective - 1:.1%}"])
    left = len(plans) - len(rows) + 1
    return [*aligned(rows), *([f"and {left} more placements"] if left > 0 else [])]


def as_json(plans: Sequence[Plan], config: Config) -> dict[str, Any]:
    """Return the plans as plain values for JSON, the best first."""
    problem = plans[0].problem
    return {
        "algorithm": config.algorithm,
        "devices": [{"profile": each.profile.name, "count": each.count} for each in problem.devices],
        "stages": problem.stage_names,
        "calls": list(map(str, problem.dataflow.working)),
        "plans": [_plan(plan, config) for plan in plans],
    }


def _plan(plan: Plan, config: Config) -> dict[str, Any]:
    pools = []
    for name, pool in zip(pool_names(plan), plan.pools, strict=True):
        profile = plan.problem.devices[pool.kind].profile
        roles = [
            {
                "role": part.role,
                "layout": [part.layout.pp, part.layout.tp, part.layout.dp],
                "generation": None if part.generation is None else [part.generation.pp, part.generation.tp],
                "rows_at_once": part.slots or None,
                "seconds": list(part.stages),
            }
            for part in pool.parts
        ]
        held = pool.held / UNITS * profile.memory * profile.usable
        sizes = {"devices": pool.count, "device": profile.name, "memory": held, "capacity": profile.memory}
        pools.append({"name": name, **sizes, "roles": roles})
    return {
        "seconds": plan.seconds,
        "stage_seconds": list(plan.stages),
        "tokens_per_second": plan.tokens_per_second,
        "dollars": plan.seconds * plan.dollars_an_hour / 3600,
        "pools": pools,
        "overrides": values(plan, config),
    }
