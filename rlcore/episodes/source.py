"""Sources of requests that come and go with the answers to earlier ones, and the loop that decodes them together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rlcore.engine.rollout import Finished, Request, RolloutEngine

LONGEST_WAIT = 0.5
"""Seconds that an idle engine waits for requests at a time."""
FOLLOWS_WITHIN = 0.002
"""Seconds within which a request belongs to those before it: environments that were called together answer so."""
LONGEST_GATHERING = 0.02
"""Seconds that requests which are there wait for those that follow, at most."""


class RequestSource(Protocol):
    """Gives requests, and gets each answer before it has to give all of them."""

    @property
    def done(self) -> bool:
        """Whether no request will come any more, and no answer is awaited."""

    def poll(self, wait: float) -> Sequence[Request]:
        """Return new requests, possibly none; wait up to `wait` seconds for the first one."""

    def take(self, row: Finished) -> None:
        """Take the answer to a request."""


def answer_requests(engine: RolloutEngine, source: RequestSource) -> float:
    """Decode the requests of `source` until it is done; return the seconds in which there was no row to decode.

    Rows whose answer is awaited elsewhere take no slot of the engine. After an error the engine is idle.
    """
    idle = 0.0
    try:
        while not source.done:
            start = time.perf_counter()
            waits = not engine.in_flight
            requests = list(source.poll(LONGEST_WAIT if waits else 0.0))
            if waits and requests:
                requests += _those_that_follow(source)
            if requests:
                engine.add(requests)
            if waits:
                idle += time.perf_counter() - start
            for row in engine.step():
                source.take(row)
    except BaseException:
        engine.abort(list(engine.in_flight))
        raise
    return idle


def _those_that_follow(source: RequestSource) -> list[Request]:
    """Return the requests that come shortly after others.

    Rows that begin together share a forward, and end together; a row that is late has one of its own in each turn.
    """
    found: list[Request] = []
    until = time.perf_counter() + LONGEST_GATHERING
    while time.perf_counter() < until and (late := source.poll(FOLLOWS_WITHIN)):
        found += late
    return found
