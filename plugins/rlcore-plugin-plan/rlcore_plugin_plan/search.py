"""Searches the best placement: set partitions of the roles, pool sizes, and a layout for each role.

HybridFlow's Algorithms 1 and 2 (arXiv 2409.19256, section 6), made exact. The algorithms keep the fastest layout of
each role; here a pool keeps every option that no other option beats in all stages. Branch and bound cuts off
allocations. The lower bound gives each remaining pool all remaining devices, and its best time in each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from rlcore import ConfigError
from rlcore.planning import ROLLOUT
from rlcore_plugin_plan.options import Option, Options
from rlcore_plugin_plan.problem import Problem
from rlcore_plugin_plan.shortage import does_not_fit

Roles = tuple[str, ...]
Left = tuple[int, ...]
"""Number of remaining devices of each kind."""


@dataclass(frozen=True)
class Plan:
    """A placement: its pools, with the chosen option of each."""

    problem: Problem
    pools: tuple[Option, ...]

    @cached_property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage: the time of the slowest pool."""
        return tuple(map(max, zip(*(pool.stages for pool in self.pools), strict=True)))

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.problem.seconds(self.stages)

    @property
    def dollars_an_hour(self) -> float:
        """Price of all used devices for an hour."""
        return sum(pool.count * self.problem.devices[pool.kind].profile.dollars for pool in self.pools)

    @property
    def objective(self) -> float:
        """The value that the search minimises: seconds or dollars of a step."""
        return self.seconds if self.problem.objective == "time" else self.seconds * self.dollars_an_hour / 3600

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens of all sampled rows, over the step's time."""
        rows = sum(call.rows for call in self.problem.dataflow.working if call.method == "generate")
        work = self.problem.work
        return work.prompts * (rows or 1.0) * work.lengths.row / self.seconds

    @property
    def placement(self) -> tuple[Roles, ...]:
        """The roles of each pool."""
        return tuple(sorted(pool.roles for pool in self.pools))


def search(problem: Problem) -> list[Plan]:
    """Return the best plan of each placement that fits, the best first.

    Raises ConfigError when no placement fits; the message has the missing bytes and the smallest change that would fit.
    """
    options = Options(problem)
    plans = []
    for sets in placements(problem):
        found = _Placement(options, sets).best()
        if found is not None:
            plans.append(found)
    if not plans:
        raise ConfigError(does_not_fit(problem, options.shortages.values()))
    return sorted(plans, key=lambda plan: plan.objective)


def partitions(roles: Sequence[str]) -> Iterator[tuple[Roles, ...]]:
    """Yield all ways to put roles into pools. Bell's number counts them: 5 for three roles, 15 for four."""
    if not roles:
        yield ()
        return
    first, *rest = roles
    for smaller in partitions(rest):
        yield ((first,), *smaller)
        for index, pool in enumerate(smaller):
            yield (*smaller[:index], (first, *pool), *smaller[index + 1 :])


def fewest(problem: Problem) -> int | None:
    """Return the smallest number of devices on which some placement fits, None if there is none.

    Each pool takes the kind of device of which it needs the fewest.
    """
    options = Options(problem)
    total, best = sum(each.count for each in problem.devices), None
    for sets in placements(problem):
        needed = 0
        for one in sets:
            roles = problem.in_order(one)
            sizes = [options.smallest(roles, kind) for kind in range(len(problem.devices))]
            needed += min((size for size in sizes if size is not None), default=total + 1)
        if needed <= (total if best is None else best):
            best = needed
    return best


def placements(problem: Problem) -> Iterator[tuple[Roles, ...]]:
    """Yield the placements to search: all, or the fixed one. A pool that samples ahead has no other role."""
    fixed = problem.fixed.pools
    for sets in partitions(problem.roles):
        if any(ROLLOUT in roles and len(roles) > 1 for roles in sets):
            continue  # another role on this pool would wait for sampling
        if fixed is None or {frozenset(roles) for roles in sets} == set(fixed):
            yield sets


class _Placement:
    """Finds the best sizes and options of one placement's pools."""

    def __init__(self, options: Options, sets: tuple[Roles, ...]) -> None:
        self.options, self.problem = options, options.problem
        self.by_cost = self.problem.objective == "cost"
        everything = tuple(devices.count for devices in self.problem.devices)
        order = {self.problem.in_order(roles) for roles in sets}
        # Slow pools first: their times tighten the bound soonest.
        self.sets = sorted(order, key=lambda roles: (-sum(self._least(roles, everything) or ()), roles))
        self.everything = everything
        fixed = self.problem.fixed.pools or {}
        self.sizes = {roles: fixed.get(frozenset(roles)) for roles in self.sets}
        kinds = range(len(everything))
        self.fits = [list(map(partial(self.options.smallest, roles), kinds)) for roles in self.sets]
        self.found: Plan | None = None
        self.bound = float("inf")

    def best(self) -> Plan | None:
        """Return the best plan; None when the pools do not fit."""
        if [None] * len(self.everything) in self.fits:
            return None
        self._start()
        self._extend((), self.everything, (0.0,) * self.options.entries, 0.0)
        return self.found

    def _choices(self, roles: Roles, kind: int, count: int) -> tuple[Option, ...]:
        """Return the options of a pool on `count` devices; when minimising time, also options that leave some idle."""
        if self.by_cost:
            return self.options.of_pool(roles, kind, count)
        if self.sizes[roles] is not None:
            return self.options.of_pool(roles, kind, count)
        return self.options.best_up_to(roles, kind, count)

    def _least(self, roles: Roles, left: Left) -> tuple[float, ...] | None:
        """Return the least time of the roles in each stage by itself, with all remaining devices."""
        known = self.options.least
        key = (roles, left)
        if key not in known:
            vectors: list[tuple[float, ...]] = []
            for kind, count in enumerate(left):
                most = self.problem.devices[kind].at_most(count)
                vectors += [option.stages for option in self.options.best_up_to(roles, kind, most)]
            known[key] = tuple(min(values) for values in zip(*vectors, strict=True)) if vectors else None
        return known[key]

    def _extend(self, chosen: tuple[Option, ...], left: Left, stages: tuple[float, ...], price: float) -> None:
        """Try every size and option of the next pool whose lower bound is below the best plan."""
        index = len(chosen)
        if index == len(self.sets):
            self._keep(chosen)
            return
        rest = self.sets[index + 1 :]
        for kind, count in self._sizes(index, left):
            after = tuple(n - count if k == kind else n for k, n in enumerate(left))
            lower = [self._least(roles, after) for roles in rest]
            if any(least is None for least in lower):
                continue
            later = [max(values) for values in zip(*lower, strict=True)] if lower else [0.0] * len(stages)  # type: ignore[arg-type]
            paid = price + count * self.problem.devices[kind].profile.dollars
            for option in self._choices(self.sets[index], kind, count):
                now = tuple(map(max, stages, option.stages))
                if self._objective(tuple(map(max, now, later)), paid) < self.bound:
                    self._extend((*chosen, option), after, now, paid)

    def _sizes(self, index: int, left: Left) -> Iterator[tuple[int, int]]:
        """Yield the sizes of a pool that leave enough devices for later pools; the last pool takes all of them."""
        rest = range(index + 1, len(self.sets))
        for kind, devices in enumerate(self.problem.devices):
            fewest = self.fits[index][kind]
            if fewest is None:
                continue
            # With several kinds, a later pool may fit on another kind, so nothing has to be left on this one.
            needed = sum(self.fits[other][kind] or 0 for other in rest) if len(left) == 1 else 0
            most = left[kind] - needed
            sizes = [n for n in devices.allocations if fewest <= n <= most]
            if self.sizes[self.sets[index]] is not None:
                sizes = [fewest] if fewest <= most else []
            elif not self.by_cost and index == len(self.sets) - 1:
                sizes = sizes[-1:]
            yield from ((kind, count) for count in reversed(sizes))

    def _objective(self, stages: tuple[float, ...], price: float) -> float:
        return self.problem.seconds(stages) * (price / 3600 if self.by_cost else 1.0)

    def _keep(self, chosen: tuple[Option, ...]) -> None:
        plan = Plan(self.problem, chosen)
        if plan.objective < self.bound:
            self.found, self.bound = plan, plan.objective

    def _start(self) -> None:
        """Find a good plan greedily, so that the bound cuts off much: enlarge a pool as long as that helps."""
        chosen = any(size is not None for size in self.sizes.values())
        if len(self.sets) == 1 or self.by_cost or len(self.everything) > 1 or chosen:
            return
        sizes = [fewest[0] or 0 for fewest in self.fits]
        while True:
            spare = self.everything[0] - sum(sizes)
            if spare < 0:
                return
            self._keep_sizes(sizes)
            scored = [(self._lower(each), each) for each in self._enlarged(sizes, spare)]
            if not scored or min(scored)[0] > self._lower(sizes):
                return
            sizes = min(scored)[1]

    def _enlarged(self, sizes: Sequence[int], spare: int) -> Iterator[list[int]]:
        """Yield the sizes with one pool enlarged by at most `spare` devices."""
        for index, size in enumerate(sizes):
            for larger in self.problem.devices[0].allocations:
                if size < larger <= size + spare:
                    yield [*sizes[:index], larger, *sizes[index + 1 :]]

    def _lower(self, sizes: Sequence[int]) -> tuple[float, int]:
        """Return the least time of a step with these pool sizes, and the number of their devices."""
        vectors = [self._least(roles, (size,)) for roles, size in zip(self.sets, sizes, strict=True)]
        stages = tuple(map(max, zip(*vectors, strict=True)))  # type: ignore[arg-type]
        return self.problem.seconds(stages), sum(sizes)

    def _keep_sizes(self, sizes: Sequence[int]) -> None:
        """Keep the plan of pools of these sizes, each with its fastest option."""
        chosen = [
            min(self._choices(roles, 0, size), key=lambda option: self.problem.seconds(option.stages))
            for roles, size in zip(self.sets, sizes, strict=True)
        ]
        self._keep(tuple(chosen))
