"""A planning problem: an algorithm's dataflow, the models of its roles, a step's rows, and the devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from rlcore import RolloutCapabilities, TrainCapabilities
from rlcore.planning import ROLLOUT
from rlcore_plugin_plan.dataflow import GENERATION, Call, Dataflow
from rlcore_plugin_plan.model_size import ModelSize
from rlcore_plugin_plan.profile import Profile
from rlcore_plugin_plan.workload import Workload

Objective = Literal["time", "cost"]


@dataclass(frozen=True)
class Devices:
    """A number of devices of one kind."""

    profile: Profile
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.profile.name}"

    @cached_property
    def allocations(self) -> list[int]:
        """The sizes that a pool can have: powers of two below a machine, and whole machines."""
        machine = self.profile.per_machine
        below = [2**power for power in range(machine.bit_length()) if 2**power < machine and 2**power <= self.count]
        return below + list(range(machine, self.count + 1, machine))

    def at_most(self, count: int) -> int:
        """The largest size that is at most `count`; 0 when there is none."""
        place = bisect_right(self.allocations, count)
        return self.allocations[place - 1] if place else 0


@dataclass(frozen=True)
class Fixed:
    """Choices that the config has made: pools and their sizes, [pp, tp] of roles, and `rollout.tp`.

    `pools`: number of devices by the roles of a pool (a number of None: the planner chooses); None: any placement.
    `generation_tp`: `rollout.tp` of the roles for which it is given.
    """

    pools: Mapping[frozenset[str], int | None] | None = None
    layouts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    generation_tp: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnSettings:
    """A role's own precision, engines and rollout keys (`roles.NAME.*`, or those of the algorithm's Role).

    `engine`: the name of its train engine. `work`: the fields of Workload in which it differs from the run.
    """

    engine: str
    train: TrainCapabilities
    rollout: RolloutCapabilities
    work: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """A planning problem. `trains`: the roles with an optimizer. `leaders`: the followed role of each follower.

    `ahead`: steps that sampling runs ahead of training, on a pool of its own. `objective`: minimise the time or the
    cost of a step; unused devices cost nothing. `rollout`, `train`: the engines' capabilities. `own`: the settings of
    roles that differ from the run's. `frozen`: the roles whose weights only forwards read; bf16 ones
    are held in bf16.
    """

    dataflow: Dataflow
    sizes: Mapping[str, ModelSize]
    trains: frozenset[str]
    work: Workload
    devices: tuple[Devices, ...]
    leaders: Mapping[str, str]
    ahead: int = 0
    objective: Objective = "time"
    fixed: Fixed = Fixed()
    rollout: RolloutCapabilities = field(default_factory=lambda: RolloutCapabilities(tensor_shards=True))
    train: TrainCapabilities = field(default_factory=lambda: TrainCapabilities(layouts=True))
    own: Mapping[str, OwnSettings] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles to place."""
        return tuple(self.sizes)

    def in_order(self, roles: Collection[str]) -> tuple[str, ...]:
        """Return these roles in the problem's order."""
        return tuple(role for role in self.roles if role in roles)

    @cached_property
    def _by_role(self) -> dict[str, tuple[Call, ...]]:
        by_role: dict[str, tuple[Call, ...]] = dict.fromkeys(self.sizes, ())
        for call in self.dataflow.working:
            if call.role in by_role:
                by_role[call.role] += (call,)
        return by_role

    def calls(self, role: str) -> tuple[Call, ...]:
        """The working calls of a role."""
        return self._by_role[role]

    @cached_property
    def _works(self) -> dict[str, Workload]:
        return {role: replace(self.work, **own.work) for role, own in self.own.items()}

    def work_of(self, role: str) -> Workload:
        """The workload as a role's engines see it."""
        return self._works.get(role, self.work)

    def train_of(self, role: str) -> TrainCapabilities:
        """The capabilities of a role's train engine."""
        return self.own[role].train if role in self.own else self.train

    def rollout_of(self, role: str) -> RolloutCapabilities:
        """The capabilities of a role's rollout engine."""
        return self.own[role].rollout if role in self.own else self.rollout

    def same_engine(self, role: str, other: str) -> bool:
        """Whether two roles have the same train engine."""
        engines = [self.own[each].engine if each in self.own else None for each in (role, other)]
        return engines[0] == engines[1]

    def sampled_apart(self, sampled: str) -> Problem:
        """Return the problem with the sampling of role `sampled` as a role of its own, one step ahead of training.

        Log-probs that the rollout served come from older weights then, so they have to be computed.
        """
        calls = tuple(
            replace(call, role=ROLLOUT)
            if call.method in GENERATION and call.role == sampled
            else replace(call, works=call.works or call.served)
            for call in self.dataflow.calls
        )
        sizes = {**self.sizes, ROLLOUT: self.sizes[sampled]}
        own = {**self.own, ROLLOUT: self.own[sampled]} if sampled in self.own else self.own
        return replace(self, dataflow=replace(self.dataflow, calls=calls), sizes=sizes, own=own, ahead=1)

    def seconds(self, stages: tuple[float, ...]) -> float:
        """Return the time of a step: the sum of its stages.

        With rollouts ahead, sampling (entry 0) overlaps the rest.
        """
        if self.ahead:
            return max(stages[0], sum(stages[1:]))
        return sum(stages)

    @property
    def stage_names(self) -> list[str]:
        """The names of the entries of a vector of stages."""
        return ["sampling ahead", *self.dataflow.names] if self.ahead else self.dataflow.names
