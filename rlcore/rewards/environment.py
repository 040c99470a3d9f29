"""The reward of an episode by its environment."""

from __future__ import annotations

from typing import Any


def environment(prompt: str, response: str, answer: Any, *, episode_score: float | None = None) -> float:
    """Return the environment's score of the episode.

    Raises ValueError for an episode without one: the environment has no method `score`, or an agent posted no reward.
    """
    if episode_score is None:
        raise ValueError(
            "the episode has no score: give the environment a method `score`, have the agent post a reward, or name "
            "another reward with reward.functions"
        )
    return episode_score
