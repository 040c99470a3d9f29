"""The environment `reasoning_gym`: a question, and one or more attempts at its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore_plugin_reasoning_gym.config import AttemptsConfig

WRONG = "That is not right. Try again."


class ReasoningGym:
    """One question of `data=reasoning_gym`.

    Each answer's score is its turn's reward. The episode ends with a right answer or the last attempt. Its score is the
    best answer's, times `discount` for each attempt before that one.
    """

    def __init__(self, config: AttemptsConfig) -> None:
        self._config = config
        self._attempts = 0
        self._best = 0.0

    def reset(self, reasoning_gym: Mapping[str, Any], answer: str | None) -> None:
        """Begin with a row of the data set; its prompt is the question."""
        self._entry, self._reference = reasoning_gym, answer

    def step(self, messages: list[dict[str, Any]]) -> Any:
        """Score an answer; a wrong one that is not the last is answered with WRONG."""
        from rlcore.episodes import Observation
        from rlcore_plugin_reasoning_gym.verify import answer_in, verify

        text = answer_in(messages[-1]["content"], self._entry["answer_form"])
        value = verify(self._entry, self._reference, text)
        self._best = max(self._best, value * self._config.discount**self._attempts)
        self._attempts += 1
        over = value >= self._config.pass_score or self._attempts >= self._config.attempts
        return Observation(None if over else WRONG, reward=value, done=over)

    def score(self) -> float:
        """Return the best answer's score, discounted."""
        return self._best
