"""The keys `data.reasoning_gym.*` and `env.reasoning_gym.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlcore import option


@dataclass(frozen=True)
class TasksConfig:
    """The rows: which generators, how many rows, how hard."""

    tasks: dict[str, float] = option({}, "weight of each generator, as {chain_sum: 1.0}; empty: all, equally")
    options: dict[str, Any] = option({}, "parameters of generators, as {chain_sum: {max_terms: 2}}")
    size: int = option(1000, "training rows", min=1)
    eval_size: int = option(200, "held-out rows; data.eval_size of them are evaluated", min=1)
    seed: int = option(0, "seed of the rows", min=0)
    levels: int = option(
        0,
        "difficulty levels of reasoning-gym's curricula, rising with the place of the row; 0: no curriculum, and the "
        "generators' own difficulty",
        min=0,
    )
    answer: Literal["auto", "tagged", "whole"] = option(
        "auto",
        "the answer in a response. tagged: the text of its last <answer>...</answer>, none without it; whole: the "
        "response; auto: tagged where it has the tag, else whole",
    )


@dataclass(frozen=True)
class AttemptsConfig:
    """How an episode goes on after an answer."""

    attempts: int = option(1, "most answers to a question; after a wrong one the environment says so", min=1)
    pass_score: float = option(1.0, "an answer is right from this score on", min=0.0, max=1.0)
    discount: float = option(1.0, "factor on the score for each earlier attempt", min=0.0, max=1.0)
