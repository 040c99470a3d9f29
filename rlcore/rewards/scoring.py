"""Scoring of rows with one or several weighted reward functions, and the record of failures."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config.schema import RewardConfig
from rlcore.errors import ConfigError
from rlcore.rewards.compose import WeightedReward
from rlcore.rewards.process import FLOAT32_MAX, RewardFailure, RewardProcess

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """The rewards of some rows: lists of equal length, in the rows' order.

    `totals` are the weighted sums, or where a function failed `reward.error_value`, NaN if that is null. `by_function`
    has each function's own scores, before weighting; NaN where it does not apply. `failures` holds None, or for the
    first function that failed on that row {"function", "cause", "traceback"}, all strings. `extracted` are the
    responses' final answers, by the first function with an `extract`: None where it finds none, and for all if they
    were not asked for.
    """

    totals: list[float]
    by_function: dict[str, list[float]]
    failures: list[dict[str, str] | None]
    extracted: list[str | None]


class Rewards:
    """A run's reward functions in a separate process, each call under the configured limits."""

    def __init__(self, functions: Sequence[WeightedReward], config: RewardConfig) -> None:
        self.functions = list(functions)
        self._config = config
        self._process = RewardProcess(self.functions, config.memory_mb)

    def start(self) -> None:
        """Start the process and load the functions; ConfigError when one cannot be loaded there."""
        try:
            self._process.start()
        except RewardFailure as failure:
            limit = f" (reward.memory_mb is {self._config.memory_mb})" if "Memory" in failure.cause else ""
            raise ConfigError(f"{failure.cause}{limit}\n{failure.traceback}".rstrip()) from None

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        extracts: bool = False,
    ) -> Scored:
        """Return the rewards of these rows; `columns` are further data columns, for functions that accept them.

        A function has `reward.timeout` seconds per row, a batched one that times the number of rows for its single
        call. A function that returns None for a row takes no part in its sum. If all with a weight do, the row has
        failed, unless a reward model scores it too. A failure never raises: the result holds it, and a warning is
        logged.
        """
        rows = len(prompts)
        value = math.nan if self._config.error_value is None else self._config.error_value
        totals = [0.0] * rows
        weighted = any(function.weight for function in self.functions)
        applied = [self._config.model is not None] * rows
        failures: list[dict[str, str] | None] = [None] * rows
        by_function: dict[str, list[float]] = {}
        extracted: list[str | None] = [None] * rows
        extractor = next((number for number, each in enumerate(self.functions) if each.extract is not None), None)
        for number, function in enumerate(self.functions):
            scores = by_function[function.name] = [value] * rows
            asks = extracts and number == extractor
            scored = self._process.scores(number, prompts, responses, answers, columns, self._config.timeout, asks)
            for row, score in enumerate(scored):
                if isinstance(score, RewardFailure):
                    failures[row] = failures[row] or _account(function.name, score)
                    continue
                if asks:
                    extracted[row] = score.answer
                if score.value is None:
                    scores[row] = math.nan
                else:
                    scores[row] = score.value
                    totals[row] += function.weight * score.value
                    applied[row] |= function.weight != 0 or not weighted
        for row, total in enumerate(totals):
            if failures[row] is None and not applied[row]:
                failures[row] = _account("total", RewardFailure("is missing: every reward returned None"))
            if failures[row] is None and not abs(total) <= FLOAT32_MAX:
                failures[row] = _account("total", RewardFailure(f"is {total}, not a finite 32-bit number"))
            if failures[row] is not None:
                totals[row] = value
        _warn(failures)
        return Scored(totals, by_function, failures, extracted)

    def close(self) -> None:
        """Kill the process."""
        self._process.close()


def check(functions: Sequence[WeightedReward], config: RewardConfig) -> None:
    """Load the functions in a reward process once, before a run starts; ConfigError when that fails."""
    rewards = Rewards(functions, config)
    try:
        rewards.start()
    finally:
        rewards.close()


def _account(function: str, failure: RewardFailure) -> dict[str, str]:
    return {"function": function, "cause": failure.cause, "traceback": failure.traceback}


def _warn(failures: Sequence[dict[str, str] | None]) -> None:
    failed = [failure for failure in failures if failure is not None]
    if failed:
        first = failed[0]
        _log.warning(
            "%d of %d samples have no reward; the first: %s %s\n%s",
            len(failed),
            len(failures),
            first["function"],
            first["cause"],
            first["traceback"],
        )
