"""The options of each set of roles on a number of devices: layouts, seconds in each stage, and memory.

An option is dropped only if another beats it in all stages and in memory, so no optimum is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import add, le
from typing import TypeVar

from rlcore.engine import GenerationLayout, Layout
from rlcore.planning import ROLLOUT
from rlcore_plugin_plan import generation, memory
from rlcore_plugin_plan.dataflow import FORWARD, GENERATION, UPDATE, Call
from rlcore_plugin_plan.generation import generate_seconds, transition_seconds
from rlcore_plugin_plan.inference import forward_seconds, weights_seconds
from rlcore_plugin_plan.problem import Devices, Problem
from rlcore_plugin_plan.training import shard_of, update_seconds

T = TypeVar("T")

UNITS = 256
"""Units that a device's memory is divided into; needs are counted in units, rounded up."""


@dataclass(frozen=True)
class Part:
    """A role on a pool: its layout, its seconds in each stage, and the units of memory that it holds.

    `generation`: its replicas; each decodes `slots` rows at once.
    """

    role: str
    layout: Layout
    stages: tuple[float, ...]
    resident: int
    working: int
    generation: GenerationLayout | None = None
    generating: int = 0
    slots: int = 0

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of a generating layout that the time of decoding depends on."""
        if self.generation is None:
            return ()
        replicas = self.generation
        return (
            replicas.pp,
            replicas.tp,
            replicas.replicas,
            self.layout.tp if replicas.pp > 1 or replicas.tp > 1 else 1,
        )


@dataclass(frozen=True)
class Joined:
    """Layouts of roles that share devices: sums of stages and resident memory, the maximum of working memory."""

    parts: tuple[Part, ...]
    stages: tuple[float, ...]
    resident: int
    working: int
    generating: int

    def with_part(self, part: Part) -> Joined:
        """Return the layouts together with the layout of one more role."""
        return Joined(
            (*self.parts, part),
            tuple(map(add, self.stages, part.stages)),
            self.resident + part.resident,
            max(self.working, part.working),
            self.generating + part.generating,
        )


@dataclass(frozen=True)
class Option:
    """Roles together on `count` devices of a kind: the sum of their stages, and the peak memory in units."""

    parts: tuple[Part, ...]
    stages: tuple[float, ...]
    count: int
    kind: int
    held: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that share the devices."""
        return tuple(part.role for part in self.parts)


@dataclass(frozen=True)
class Shortage:
    """The reason why roles do not fit on `count` devices: bytes of the smallest option, and of a device.

    `needed` is None when there is no layout at all.
    """

    roles: tuple[str, ...]
    kind: int
    count: int
    needed: float | None
    capacity: float


class Options:
    """The options of every set of roles, each computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.entries = len(problem.stage_names)
        self.shortages: dict[tuple[tuple[str, ...], int], Shortage] = {}
        self.least: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[float, ...] | None] = {}
        # A cache for each problem: @cache on the methods would mix problems and keep them alive.
        self.of_role = cache(self._of_role)
        self.of_pool = cache(self._of_pool)
        self.best_up_to = cache(self._best_up_to)
        self._joined = cache(self._join)
        self._cumulated: dict[tuple[tuple[str, ...], int, int], tuple[Option, ...]] = {}
        self._memory_counts = cache(self._memory_is_counted)
        self._decoded: dict[tuple[object, ...], tuple[float, ...]] = {}

    def unit(self, kind: int) -> float:
        """Bytes of a unit of memory."""
        profile = self.problem.devices[kind].profile
        return profile.memory * profile.usable / UNITS

    def _of_role(self, role: str, kind: int, count: int, apart: bool) -> tuple[Part, ...]:
        """Return every layout that a role's model allows, with its stages except decoding.

        `apart`: the followed role is on another pool.
        """
        parts = []
        for layout in self._layouts(role, self.problem.devices[kind], count):
            for replicas in self._generations(role, layout):
                parts.append(self._part(role, layout, replicas, kind, apart))
        return tuple(parts)

    def _layouts(self, role: str, devices: Devices, count: int) -> Iterable[Layout]:
        size, work = self.problem.sizes[role], self.problem.work_of(role)
        if count > 1 and role != ROLLOUT and not self.problem.train_of(role).layouts:
            return
        tp = 1
        while tp <= min(count, devices.profile.per_machine):
            if count % tp == 0:
                stages = [p for p in range(1, min(count // tp, size.layers) + 1) if count // tp % p == 0]
                for pp in [1] if role == ROLLOUT else stages:
                    layout = Layout(pp, tp, count // (pp * tp))
                    fixed = self.problem.fixed.layouts.get(role, (pp, tp))
                    possible = not size.shape.problem(layout) and layout.dp % shard_of(work, layout) == 0
                    if possible and fixed == (pp, tp):
                        yield layout
            tp *= 2

    def _generations(self, role: str, layout: Layout) -> Sequence[GenerationLayout | None]:
        if not any(call.method in GENERATION for call in self.problem.calls(role)):
            return [None]
        fixed = self.problem.fixed.generation_tp.get(role)
        if role == ROLLOUT:
            return [GenerationLayout(layout, tp=layout.tp)] if fixed in (None, layout.tp) else []
        shards = [t for t in range(1, layout.tp + 1) if layout.tp % t == 0 and fixed in (None, t)]
        return [GenerationLayout(layout, tp=t) for t in shards]

    def _part(self, role: str, layout: Layout, replicas: GenerationLayout | None, kind: int, apart: bool) -> Part:
        problem, profile = self.problem, self.problem.devices[kind].profile
        size, work, unit = problem.sizes[role], problem.work_of(role), self.unit(kind)
        stages = [0.0] * self.entries
        for entry, calls in self._entries():
            mine = [call for call in calls if call.role == role]
            stages[entry] += sum(self._seconds(call, layout, kind, apart) + profile.call_seconds for call in mine)
            if replicas is not None and any(call.method in GENERATION for call in mine):
                if role != ROLLOUT:
                    stages[entry] += transition_seconds(size, replicas, work, profile)
                else:
                    stages[entry] += generation.send_seconds(size, layout, layout.world_size, work, profile)
        generating = 0.0 if replicas is None else memory.generating_bytes(size, replicas, work, apart=role == ROLLOUT)
        held = memory.Held(0.0, 0.0)
        if role != ROLLOUT:
            calls = tuple(call for call in problem.calls(role) if call.method in (*FORWARD, *UPDATE))
            frozen = role in problem.frozen
            held = memory.role_held(size, layout, role in problem.trains, calls, work, frozen=frozen)
        return Part(
            role,
            layout,
            tuple(stages),
            resident=math.ceil(held.resident / unit),
            working=math.ceil(held.working / unit),
            generation=replicas,
            generating=math.ceil(generating / unit),
        )

    def _entries(self) -> Iterable[tuple[int, tuple[Call, ...]]]:
        """Yield the calls of each entry of a vector of stages; with rollouts ahead, entry 0 is sampling."""
        for number, calls in enumerate(self.problem.dataflow.stages):
            if not self.problem.ahead:
                yield number, calls
            else:
                yield 0, tuple(call for call in calls if call.role == ROLLOUT)
                yield number + 1, tuple(call for call in calls if call.role != ROLLOUT)

    def _seconds(self, call: Call, layout: Layout, kind: int, apart: bool) -> float:
        """Return the seconds of a call without decoding."""
        problem, profile = self.problem, self.problem.devices[kind].profile
        size, work = problem.sizes[call.role], problem.work_of(call.role)
        if call.method in UPDATE:
            return update_seconds(size, layout, call, work, profile)
        if call.method in FORWARD:
            return forward_seconds(size, layout, call, work, profile)
        if call.method in GENERATION:
            return 0.0
        return weights_seconds(size, layout, profile, apart=apart)

    def _decoding(self, part: Part, slots: int, kind: int) -> tuple[float, ...]:
        """Return the seconds of sampling in each stage."""
        key = (part.role, part.replicas, slots, kind)
        if key not in self._decoded:
            assert part.generation is not None
            problem, seconds = self.problem, [0.0] * self.entries
            for entry, calls in self._entries():
                for call in calls:
                    if call.role == part.role and call.method in GENERATION:
                        seconds[entry] += generate_seconds(
                            problem.sizes[part.role],
                            part.generation,
                            call,
                            problem.work_of(part.role),
                            slots,
                            problem.devices[kind].profile,
                        )
            self._decoded[key] = tuple(seconds)
        return self._decoded[key]

    def _of_pool(self, roles: tuple[str, ...], kind: int, count: int) -> tuple[Option, ...]:
        """Return the options of roles that share `count` devices, without those that another beats in every stage."""
        together = self._joined(roles, kind, count)
        found = [option for joined in together if (option := self._option(joined, kind, count)) is not None]
        if found:
            self.shortages.pop((roles, kind), None)
        else:
            self._note_shortage(roles, kind, count, together)
        return tuple(front(found))

    def _join(self, roles: tuple[str, ...], kind: int, count: int) -> tuple[Joined, ...]:
        """Return the joint layouts of all roles; a role comes after the role whose weights it follows."""
        *earlier, role = roles
        leader = self.problem.leaders.get(role)
        nothing = Joined((), (0.0,) * self.entries, 0, 0, 0)
        parts = self.of_role(role, kind, count, leader is not None and leader not in earlier)
        own = self._kept((nothing.with_part(part) for part in parts), kind, count)
        before = self._joined(tuple(earlier), kind, count) if earlier else (nothing,)
        together = []
        for joined in before:
            fitting = [one.parts[0] for one in own if self._go_together(joined.parts, one.parts[0])]
            together += [joined.with_part(part) for part in fitting]
        return tuple(self._kept(together, kind, count))

    def _go_together(self, parts: tuple[Part, ...], part: Part) -> bool:
        """Whether a role has the engine and layout of the role that it follows, if both are on the pool."""
        leader = self.problem.leaders.get(part.role)
        if leader is None:
            return True
        same_engine = self.problem.same_engine(part.role, leader)
        return all(same_engine and part.layout == other.layout for other in parts if other.role == leader)

    def _kept(self, joined: Iterable[Joined], kind: int, count: int) -> list[Joined]:
        """Drop each joint layout that another beats in every stage and in memory.

        Only layouts with the same replicas are compared, as decoding is not counted yet, and with the same layouts of
        roles that follow or are followed, as these restrict the layouts of other roles.
        """
        leaders = self.problem.leaders
        tied = {*leaders, *leaders.values()}
        is_tight, free = self._memory_counts(kind, count)
        groups: dict[tuple[object, ...], list[tuple[tuple[float, ...], Joined]]] = {}
        for each in joined:
            key = (
                *(part.replicas for part in each.parts if part.generation is not None),
                *(part.layout for part in each.parts if part.role in tied),
            )
            needs = (*each.stages, float(each.resident if is_tight else 0), float(max(each.working, free)))
            groups.setdefault(key, []).append((needs, each))
        kept: list[Joined] = []
        for group in groups.values():
            kept += [each for _, each in unbeaten(group)]
        return kept

    def _memory_is_counted(self, kind: int, count: int) -> tuple[bool, int]:
        """Return whether resident memory can decide between options, and the units that are free in any case.

        Both for the worst case: all roles on these devices, each in the layout with the most memory.
        """
        parts = [self.of_role(role, kind, count, False) for role in self.problem.roles]
        if any(not own for own in parts):
            return True, 0
        free, needed, working = UNITS, 0.0, 0
        for own in parts:
            free -= max(part.resident for part in own) + max(part.generating for part in own)
            working = max([working, *(part.working for part in own)])
            replicas = [part for part in own if part.generation is not None]
            needed = max([needed, *(self._rows(part) * self._row_bytes(part) for part in replicas)])
        return max(needed / self.unit(kind), working) > free, max(0, free)

    def _rows(self, part: Part) -> int:
        """Return the largest number of rows that a replica of a generating part gets in a call."""
        assert part.generation is not None
        calls = [call for call in self.problem.calls(part.role) if call.method in GENERATION]
        return max(math.ceil(self.problem.work.rows(call) / part.generation.replicas) for call in calls)

    def _row_bytes(self, part: Part) -> float:
        """Return a device's bytes for the keys and values of a row."""
        assert part.generation is not None
        return memory.cache_bytes(self.problem.sizes[part.role], part.generation, self.problem.work_of(part.role))

    def _option(self, joined: Joined, kind: int, count: int) -> Option | None:
        """Return the parts with as many slots as the remaining memory allows; None if they do not fit."""
        problem, parts = self.problem, joined.parts
        resident, generating = joined.resident, joined.generating
        held = resident + generating + joined.working
        if held > UNITS:
            return None
        placed = []
        for part in parts:
            if part.generation is None:
                placed.append(part)
                continue
            left = UNITS - generating - (0 if problem.work.offload else resident)
            row = self._row_bytes(part)
            slots = min(math.floor(left * self.unit(kind) / row), self._rows(part))
            if slots < 1:
                return None
            decoding = self._decoding(part, slots, kind)
            stages = tuple(a + b for a, b in zip(part.stages, decoding, strict=True))
            placed.append(replace(part, stages=stages, slots=slots))
            held = max(held, UNITS - left + math.ceil(slots * row / self.unit(kind)))
        total = tuple(map(sum, zip(*(part.stages for part in placed), strict=True)))
        return Option(tuple(placed), total, count, kind, held)

    def _note_shortage(self, roles: tuple[str, ...], kind: int, count: int, together: Iterable[Joined]) -> None:
        profile, unit = self.problem.devices[kind].profile, self.unit(kind)
        needs = []
        for joined in together:
            rows = [self._row_bytes(part) for part in joined.parts if part.generation is not None]
            needs.append((joined.resident + joined.generating) * unit + max(joined.working * unit, *rows, 0.0))
        # Sizes are tried in rising order, so the kept shortage is that of the largest number of devices.
        needed = min(needs, default=None)
        self.shortages[roles, kind] = Shortage(roles, kind, count, needed, profile.memory * profile.usable)

    def smallest(self, roles: tuple[str, ...], kind: int) -> int | None:
        """Return the smallest number of devices on which the roles fit, None if there is none; a fixed size stays."""
        fixed = (self.problem.fixed.pools or {}).get(frozenset(roles))
        sizes = [n for n in self.problem.devices[kind].allocations if fixed in (None, n)]
        return next((n for n in sizes if self.of_pool(roles, kind, n)), None)

    def _best_up_to(self, roles: tuple[str, ...], kind: int, count: int) -> tuple[Option, ...]:
        """Return the options on at most `count` devices (an allocation, or 0); the remaining devices stay idle."""
        best: tuple[Option, ...] = ()
        for size in self.problem.devices[kind].allocations:
            if size <= count:
                key = roles, kind, size
                if key not in self._cumulated:
                    self._cumulated[key] = tuple(front([*best, *self.of_pool(roles, kind, size)]))
                best = self._cumulated[key]
        return best


def front(options: Iterable[Option]) -> list[Option]:
    """Return the options that no other option beats in every stage; of equal ones the first."""
    scored = [(option.stages, option) for option in options]
    return [option for _, option in unbeaten(scored)]


def unbeaten(scored: Sequence[tuple[tuple[float, ...], T]]) -> list[tuple[tuple[float, ...], T]]:
    """Return the Pareto front: entries for which no other has scores that are all as low; of equal ones the first."""
    kept: list[tuple[tuple[float, ...], T]] = []
    for scores, thing in sorted(scored, key=lambda entry: entry[0]):
        for other, _ in kept:
            if all(map(le, other, scores)):
                break
        else:
            kept.append((scores, thing))
    return kept
