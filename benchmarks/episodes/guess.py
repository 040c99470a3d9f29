"""A guessing game for the tiny model, as a plugin file: `-p benchmarks/episodes/guess.py data=guess env=guess`.

A number from 0 to 99 is hidden. After a wrong guess the environment answers with the way to it from there, such as
`10+47=`; four guesses are allowed. Nothing in the prompt tells the number, so a first guess is right once in a hundred
times, and a policy wins by using the answers.
"""

from __future__ import annotations

import random
from typing import Any

from rlcore import DataConfig, DatasetSpec, EnvironmentSpec, hookimpl
from rlcore.episodes import Observation

RLCORE_API = 1

LARGEST = 99
GUESSES = 4
HELD_OUT = 12
"""Numbers that no training episode hides."""
REPEATS = 20
"""Held-out episodes for each of these numbers."""
CONSOLATION = 0.5
"""The score of a lost game whose last guess has all the digits of the number, and some more."""


def load(config: DataConfig, split: str) -> list[dict[str, Any]]:
    """Return a row for each hidden number; held-out ones stand in `REPEATS` rows. The prompt is the game's name."""
    numbers = random.Random("guess").sample(range(LARGEST + 1), LARGEST + 1)
    chosen = numbers[HELD_OUT:] if split == "train" else numbers[:HELD_OUT] * REPEATS
    return [{config.prompt_key: f"{split} {row}", "hidden": hidden} for row, hidden in enumerate(chosen)]


class Guess:
    """One game."""

    def reset(self, hidden: int) -> list[dict[str, str]]:
        """Hide a number; the prompt becomes a question mark."""
        self._hidden = hidden
        self._guesses: list[str] = []
        self._found = False
        return [{"role": "user", "content": "?"}]

    def step(self, messages: list[dict[str, Any]]) -> Observation:
        """Answer a guess. Anything but a number of one or two digits ends the game."""
        guess = messages[-1]["content"]
        self._guesses.append(guess)
        valid = guess.isascii() and guess.isdigit() and len(guess) <= 2
        self._found = valid and int(guess) == self._hidden
        if self._found or not valid or len(self._guesses) == GUESSES:
            return Observation(done=True)
        way = self._hidden - int(guess)
        return Observation(f"{guess}{way:+d}=")

    def score(self) -> float:
        """Return 1 for a found number, else up to `CONSOLATION` for the digits of the last of several guesses."""
        if self._found:
            return 1.0
        last, right = self._guesses[-1], str(self._hidden)
        if len(self._guesses) == 1:
            return 0.0
        equal = sum(a == b for a, b in zip(last, right, strict=False))
        return CONSOLATION * equal / max(len(last), len(right))


@hookimpl
def rlcore_datasets() -> DatasetSpec:
    """Register `data=guess`."""
    return DatasetSpec("guess", load, reward="environment")


@hookimpl
def rlcore_environments() -> EnvironmentSpec:
    """Register `env=guess`."""
    return EnvironmentSpec("guess", Guess)
