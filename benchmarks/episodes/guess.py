"""A guessing game for the tiny model, as a plugin file: `-p benchmarks/episodes/guess.py data=guess env=guess`.

A number from 10 to 99 is hidden. After a wrong guess the environment answers with the way to it from there, such as
`20+37=`; two guesses are allowed. Nothing in the prompt tells the number, so a first guess is right once in ninety
times, and a policy wins by using the answers.
"""

from __future__ import annotations

import random
from typing import Any

from rlcore import DataConfig, DatasetSpec, EnvironmentSpec, hookimpl
from rlcore.episodes import Observation

RLCORE_API = 1

NUMBERS = range(10, 100)
OPENING = "0+0="
"""The prompt of all games. It is one that the model knows, so that first guesses are alike: with "?" they were spread
over all numbers, and two of three seeds had learned nothing after 140 steps."""
GUESSES = 2
"""With four guesses two of three seeds did not learn in ten minutes: the credit for the last one is spread over all."""
HELD_OUT = 12
"""Numbers that no training episode hides."""
REPEATS = 20
"""Held-out episodes for each of these numbers."""
CONSOLATION = 0.5
"""The score of a lost game is below this; the digits of the later guesses decide. A guess of one digit gets nothing,
or a policy that writes the first digit only learns no second one."""


def load(config: DataConfig, split: str) -> list[dict[str, Any]]:
    """Return a row for each hidden number; held-out ones stand in `REPEATS` rows. The prompt is the game's name."""
    numbers = random.Random("guess").sample(NUMBERS, len(NUMBERS))
    chosen = numbers[HELD_OUT:] if split == "train" else numbers[:HELD_OUT] * REPEATS
    return [{config.prompt_key: f"{split} {row}", "hidden": hidden} for row, hidden in enumerate(chosen)]


class Guess:
    """One game."""

    def reset(self, hidden: int) -> list[dict[str, str]]:
        """Hide a number; the prompt becomes the opening."""
        self._hidden = hidden
        self._guesses: list[str] = []
        self._found = False
        return [{"role": "user", "content": OPENING}]

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
        """Return 1 for a found number, else a part of `CONSOLATION`."""
        if self._found:
            return 1.0
        return CONSOLATION * sum(map(self._likeness, self._guesses[1:])) / (GUESSES - 1)

    def _likeness(self, guess: str) -> float:
        """Return the share of a two-digit guess's digits that are right."""
        right = str(self._hidden)
        return sum(a == b for a, b in zip(guess, right, strict=True)) / 2 if len(guess) == 2 else 0.0


@hookimpl
def rlcore_datasets() -> DatasetSpec:
    """Register `data=guess`."""
    return DatasetSpec("guess", load, reward="environment")


@hookimpl
def rlcore_environments() -> EnvironmentSpec:
    """Register `env=guess`."""
    return EnvironmentSpec("guess", Guess)
