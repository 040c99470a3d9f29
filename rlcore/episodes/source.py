"""Sources of requests that come and go with the answers to earlier ones, and the loop that decodes them together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rlcore.engine.rollout import Finished, Request, RolloutEngine

LONGEST_WAIT = 0.5
"""Seconds that an idle engine waits for requests at a time."""


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
            if requests := source.poll(LONGEST_WAIT if waits else 0.0):
                engine.add(requests)
            if waits:
                idle += time.perf_counter() - start
            for row in engine.step():
                source.take(row)
    except BaseException:
        engine.abort(list(engine.in_flight))
        raise
    return idle
