"""The message when nothing fits: the missing memory of each set of roles, and the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlcore_plugin_plan.options import Shortage
from rlcore_plugin_plan.problem import Devices, Problem

MOST_DEVICES = 4096


def does_not_fit(problem: Problem, shortages: Iterable[Shortage]) -> str:
    """Return the message for a problem without a placement that fits."""
    devices = " and ".join(map(str, problem.devices))
    lines = [f"no placement of {', '.join(problem.roles)} fits on {devices}:"]
    # A set that contains a short set is short as well, so only the smallest sets are shown.
    short = sorted(shortages, key=lambda each: (len(each.roles), -each.count))
    shown: list[Shortage] = []
    for each in short:
        if not any(set(other.roles) <= set(each.roles) and other.kind == each.kind for other in shown):
            shown.append(each)
    lines += [f"    {_line(problem, each)}" for each in shown[:6]]
    if not shown:
        lines.append("    each role fits by itself, but all together need more devices")
    change = next(changes(problem), None)
    lines.append(
        f"The smallest change that would fit: {change}"
        if change
        else f"Neither smaller micro-batches, recomputation, bf16, offload nor {MOST_DEVICES} such devices would do; "
        "take smaller models, or unset fixed pools and layouts (cluster.pools, engine.pp, engine.tp, "
        "engine.layouts, rollout.tp)"
    )
    return "\n".join(lines)


def _line(problem: Problem, short: Shortage) -> str:
    name = problem.devices[short.kind].profile.name
    roles, where = " with ".join(short.roles), f"{short.count} {name}"
    if short.needed is None:
        return f"{roles}: no layout of the model fits {where}"
    return (
        f"{roles}: {short.needed / 1e9:.1f} GB on each of {where}, of which {short.capacity / 1e9:.1f} GB are usable: "
        f"{max(short.needed - short.capacity, 0.0) / 1e9:.1f} GB short"
    )


def changes(problem: Problem) -> Iterator[str]:
    """Yield the changes that would each fit by itself, the smallest first."""
    from rlcore_plugin_plan.search import fewest

    work, row = problem.work, int(problem.work.lengths.row)
    tokens = work.micro_batch_tokens or 65536
    settings = []
    while tokens > row:
        tokens = max(tokens // 2, row)
        settings.append((f"engine.micro_batch_tokens={tokens}", replace(work, micro_batch_tokens=tokens)))
    if (recompute := problem.train.settings.get("recompute")) is not None and not work.recompute:
        settings.append((f"{recompute}=true", replace(work, recompute=True)))
        small = replace(work, recompute=True, micro_batch_tokens=row)
        settings.append((f"{recompute}=true engine.micro_batch_tokens={row}", small))
    if problem.train.offload and not work.offload:
        settings.append(("engine.offload=true", replace(work, offload=True)))
    if work.dtype_bytes == 4:
        settings.append(("model.dtype=bf16", replace(work, dtype_bytes=2)))
    for name, changed in settings:
        if fewest(replace(problem, work=changed)) is not None:
            yield name
    last = problem.devices[-1]
    more = Devices(last.profile, MOST_DEVICES)
    if (count := fewest(replace(problem, devices=(more,)))) is not None:
        yield f"{count} {last.profile.name} in place of {' and '.join(map(str, problem.devices))} (plan.gpus)"
