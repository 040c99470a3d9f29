"""Addition and subtraction of two numbers up to 99, generated; the tiny model's task.

A prompt is `17+25=` or `42-17=` (the result is never negative); its answer is `42` or `25`. The unordered pair of
operands decides whether a problem is held out: when `17+25=` is held out, so are `25+17=` and `25-17=`. The script that
makes the tiny model trains on the same split. A row also has what algorithms that learn given responses read: a pair of
a right and a wrong result (`chosen`, `rejected`), and one of the two with its label (`completion`, `label`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

from rlcore.config.schema import DataConfig

LARGEST = 99
HELD_OUT_SHARE = 0.06


@dataclass(frozen=True)
class Problem:
    """One problem: `left` and `right` in 0..99, and `operator`, "+" or "-"."""

    left: int
    operator: str
    right: int

    @property
    def prompt(self) -> str:
        """The problem as the model sees it, such as `17+25=`."""
        return f"{self.left}{self.operator}{self.right}="

    @property
    def result(self) -> int:
        """The right answer, in 0..198."""
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def wrong_result(self) -> int:
        """Another number, at most 9 above the result, always the same one."""
        return self.result + 1 + int(9 * _fraction(f"wrong {self.prompt}"))

    @property
    def held_out(self) -> bool:
        """Whether the problem is for evaluation only."""
        low, high = sorted((self.left, self.right))
        return _fraction(f"{low} {high}") < HELD_OUT_SHARE


@cache
def problems(split: str) -> tuple[Problem, ...]:
    """Return all problems of a split ("train" or "eval"), shuffled, in an order that never changes."""
    chosen = [problem for problem in _all_problems() if problem.held_out == (split == "eval")]
    return tuple(sorted(chosen, key=lambda problem: _fraction(problem.prompt)))


def load(config: DataConfig, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split ("train" or "eval"), with the prompt and the answer under the configured names."""
    return [
        {
            config.prompt_key: problem.prompt,
            config.answer_key: str(problem.result),
            "chosen": str(problem.result),
            "rejected": str(problem.wrong_result),
            "completion": str(problem.result if label else problem.wrong_result),
            "label": label,
        }
        for problem, label in zip(problems(split), cycle((True, False)))
    ]


def _all_problems() -> Iterator[Problem]:
    for left in range(LARGEST + 1):
        for right in range(LARGEST + 1):
            yield Problem(left, "+", right)
            if left >= right:
                yield Problem(left, "-", right)


def _fraction(text: str) -> float:
    """Return a hash of `text` as a number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56
