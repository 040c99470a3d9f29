"""The dataflow of one step: the calls of the roles, their rows, and the dependencies between calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter

GENERATION = ("generate",)
FORWARD = ("log_probs", "values", "score")
UPDATE = ("update",)
WEIGHTS = ("follow", "take_weights", "send_weights")
WORK = (*GENERATION, *FORWARD, *UPDATE, *WEIGHTS)
"""The methods of a model role that take device time."""


@dataclass(frozen=True)
class Call:
    """One call of a role's workers. Row numbers are per prompt of the step's batch.

    `rows`: number of rows. `prompts`: number of distinct prompts, 0 if unknown. `share`: the longest response, as a
    share of `rollout.response_len`. `epochs` and `mini_batches`: of an update. `needs`: numbers of the calls that must
    end before this one. `together`: rows of one prompt are on one device and in one micro-batch. `works`: False for
    calls without device time, such as reward functions and `map`. `served`: it has no device time because it returned
    numbers from its input: the rollout's own log-probs.
    """

    role: str
    method: str
    rows: float
    prompts: float = 0.0
    share: float = 1.0
    epochs: int = 1
    mini_batches: int = 1
    needs: tuple[int, ...] = ()
    together: bool = False
    works: bool = True
    served: bool = False

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True)
class Dataflow:
    """The calls of a step in the order in which they were made."""

    calls: tuple[Call, ...]
    follows: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def stages(self) -> tuple[tuple[Call, ...], ...]:
        """The working calls by stage. Calls of one stage wait only for calls of earlier stages.

        A call's stage is the length of the longest chain of working calls before it. Calls of one stage may run at the
        same time when their roles are on different pools. PPO has the paper's three stages: generation, preparation,
        training.
        """
        level: list[int] = []
        for call in self.calls:
            before = [level[number] + self.calls[number].works for number in call.needs]
            level.append(max(before, default=0))
        working = [(at, call) for at, call in zip(level, self.calls, strict=True) if call.works]
        stages: dict[int, tuple[Call, ...]] = {}
        for at, call in sorted(working, key=itemgetter(0)):
            stages[at] = (*stages.get(at, ()), call)
        return tuple(stages.values())

    @property
    def working(self) -> list[Call]:
        """The working calls, stage by stage."""
        return list(chain.from_iterable(self.stages))

    @property
    def names(self) -> list[str]:
        """The name of each stage."""
        return [_name(calls) for calls in self.stages]


def _name(calls: tuple[Call, ...]) -> str:
    methods = {call.method for call in calls}
    kinds = (("training", UPDATE), ("generation", GENERATION), ("preparation", FORWARD))
    return next((name for name, some in kinds if methods & set(some)), "weights")
