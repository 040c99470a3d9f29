"""The order of an epoch by difficulty, from a column or from measured rewards, and the rows that are left out of it."""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rlcore.config.schema import MEASURED, CurriculumConfig
from rlcore.data.keys import nearest, value_at
from rlcore.errors import ConfigError, DataError


class PromptResult(NamedTuple):
    """What the last samples of a prompt have shown: their mean reward, and whether several all had the same."""

    reward: float
    is_equal: bool


class Curriculum:
    """Orders the rows of an epoch, the easiest first, and leaves out some that taught nothing when last sampled.

    Rows of equal difficulty keep the order in which they come, so a shuffled epoch stays shuffled among them. By
    `measured`, rows without a result come first.

    With `skip`, a row whose last samples all had the same reward is left out of an epoch with this probability, as in
    GRESO (arXiv 2506.02177), whose probability adapts where this one is fixed.
    """

    def __init__(self, config: CurriculumConfig, rows: Sequence[Mapping[str, Any]], where: str) -> None:
        """Raise DataError, naming the row, where the column of difficulties is no finite number."""
        self._config = config
        self._results: dict[int, PromptResult] = {}
        self._difficulties: list[float] | None = None
        by = config.by
        if by == MEASURED and any(MEASURED in row for row in rows):
            raise ConfigError(
                f"data.curriculum.by={MEASURED} means measured rewards, but {where} has a column of this name too; "
                "rename the column"
            )
        if by is not None and by != MEASURED:
            self._difficulties = [_difficulty(row, by, f"{where}, row {number}") for number, row in enumerate(rows, 1)]

    def learn(self, results: Mapping[int, PromptResult]) -> None:
        """Take what a step has measured, by row."""
        if self._config.measures:
            self._results |= results

    def order(self, rows: Sequence[int], at_least: int, draw: random.Random) -> list[int]:
        """Return the rows of an epoch in their order, `at_least` of them where there are so many.

        rows: all rows in the order of an epoch without a curriculum. draw: the epoch's own generator.
        """
        kept: list[int] = []
        left_out: list[int] = []
        for row in rows:
            taught_nothing = row in self._results and self._results[row].is_equal
            skipped = taught_nothing and draw.random() < self._config.skip
            (left_out if skipped else kept).append(row)
        kept += left_out[: max(0, at_least - len(kept))]
        return kept if self._config.by is None else sorted(kept, key=self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the results as JSON values, and what the order depends on besides."""
        state: dict[str, Any] = {"settings": self._settings}
        if self._config.measures:
            state["results"] = [[row, *result] for row, result in self._results.items()]
        return state

    def difference(self, state: Mapping[str, Any]) -> str | None:
        """Return how the order differs from that of a `state_dict`; None where it is the same."""
        if state["settings"] == self._settings:
            return None
        return (
            f"data.curriculum, or the column {self._config.by!r}, differs from the checkpoint's, so the prompts have "
            "another order"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the results of a `state_dict` without a `difference`."""
        self._results = {row: PromptResult(reward, is_equal) for row, reward, is_equal in state.get("results", [])}

    @cached_property
    def _settings(self) -> list[Any]:
        values = array("d", self._difficulties or [])
        return [
            self._config.by,
            self._config.easy,
            self._config.skip,
            hashlib.sha256(values.tobytes()).hexdigest()[:16],
        ]

    def _rank(self, row: int) -> float:
        if self._difficulties is not None:
            return self._difficulties[row] if self._config.easy == "low" else -self._difficulties[row]
        return -self._results[row].reward if row in self._results else -math.inf


def _difficulty(row: Mapping[str, Any], column: str, where: str) -> float:
    value = value_at(row, column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{where}: data.curriculum.by={column} needs a finite number in that column, got {value!r}."
            f"{nearest(row, column)} Give another column, or {MEASURED} for the rewards of earlier epochs"
        )
    return float(value)
