"""The reward of programs: Python code in a response, run isolated against the row's tests."""

from __future__ import annotations

from typing import Any

from rlcore.sandbox import Limits, passed_tests

LIMITS = Limits(seconds=4.0)
"""The limits of one test."""

SECONDS = 7.0
"""What all tests of a response may take together: less than `reward.timeout`, whose end is a failure and no score."""


def code(prompt: str, response: str, answer: Any) -> float:
    """Return 1.0 when the response's program passes all tests of the answer, else 0.0.

    `rlcore.sandbox.passed_tests` describes the answers; DataError for any other, which is the data's fault and not a
    score of zero. Raises TimeoutError when time ran out before a test could be run, and none run had failed.
    """
    return float(all(passed_tests(response, answer, LIMITS, SECONDS)))
