"""When a worker process did what: a span for each call that it ran."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One call on one rank: it arrived, waited for its inputs, began and ended (seconds since the epoch)."""

    role: str
    method: str
    rank: int
    host: str
    pid: int
    arrived: float
    began: float
    ended: float
