"""A worker process's log of its calls: one span per call."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPANS = 10_000
"""Spans that a process keeps until it is asked for them; older ones are dropped."""


@dataclass(frozen=True)
class Span:
    """One call on one rank. Times are seconds since the epoch.

    `arrived`: it was the call's turn; `began`: its inputs were there; `ended`: it returned.
    """

    role: str
    method: str
    rank: int
    host: str
    pid: int
    arrived: float
    began: float
    ended: float
