"""The reward of the arithmetic data set."""

from __future__ import annotations

from typing import Any

from rlcore.rewards.reference import reference_text


def arithmetic(prompt: str, response: str, answer: Any) -> float:
    """Return 1.0 when the response, without surrounding white space, is exactly the answer, else 0.0.

    Raises ValueError without an answer.
    """
    return float(response.strip() == reference_text(answer).strip())


def arithmetic_answer(response: str) -> str | None:
    """Return the response without surrounding white space; None for an empty one."""
    return response.strip() or None
