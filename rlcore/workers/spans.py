"""When a worker process did what: a span for each call that it ran."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SPANS = 10_000
"""Newest spans that a process keeps until it is asked for them."""


@dataclass(frozen=True)
class Span:
    """One call on one rank, in seconds since the epoch: when it was its turn, when its inputs were there, its end."""

    role: str
    method: str
    rank: int
    host: str
    pid: int
    arrived: float
    began: float
    ended: float
