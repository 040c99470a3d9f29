"""The dataflow of one step: which role did what on how many rows, and what that waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

GENERATION = ("generate",)
FORWARD = ("log_probs", "values", "score")
UPDATE = ("update",)
WEIGHTS = ("follow", "take_weights", "send_weights")
WORK = (*GENERATION, *FORWARD, *UPDATE, *WEIGHTS)
"""The methods of a model role that take device time."""


@dataclass(frozen=True)
class Call:
    """One call of a role's workers, for each prompt of the step's batch.

    `rows`: rows that it gets. `prompts`: different prompts among them, 0 where it is not known. `share`: the most
    tokens of a response, as a share of `rollout.response_len`. `epochs` and `mini_batches` are an update's. `needs`:
    the numbers of the calls that must have ended before. `together`: rows of one prompt are on one device and in one
    micro-batch. `works`: False for what takes no device time, as arithmetic beside the data and reward functions.
    `served`: it does not work either, as it handed back what it was sent: the rollout's own log-probs.
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
        """The calls that work, by stage: those of one stage wait for calls of earlier stages alone.

        A call's stage is the longest chain of working calls that it waits for, so that calls of one stage may run at
        the same time wherever their roles are on different pools. For PPO these are the paper's three: generation,
        preparation, training.
        """
        level: list[int] = []
        for call in self.calls:
            before = [level[number] + self.calls[number].works for number in call.needs]
            level.append(max(before, default=0))
        last = max((at for at, call in zip(level, self.calls, strict=True) if call.works), default=-1)
        return tuple(
            tuple(call for at, call in zip(level, self.calls, strict=True) if at == stage and call.works)
            for stage in range(last + 1)
        )

    @property
    def names(self) -> list[str]:
        """What each stage is, in a word."""
        return [_name(calls) for calls in self.stages]


def _name(calls: tuple[Call, ...]) -> str:
    methods = {call.method for call in calls}
    kinds = (("training", UPDATE), ("generation", GENERATION), ("preparation", FORWARD))
    return next((name for name, some in kinds if methods & set(some)), "weights")
