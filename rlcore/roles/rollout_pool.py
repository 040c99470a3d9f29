"""Sampling in processes of its own: the weights that they get, and the time of each switch."""

from __future__ import annotations

import math
from collections import deque

from rlcore.protocol import DataProto
from rlcore.roles.weight_exporter import WeightExporter
from rlcore.workers import WorkerGroup


class RolloutPool:
    """The workers that sample for a role, at most `ahead` steps before its training (trainer.rollouts_ahead).

    With `ahead=0` they always sample with the newest weights. With `ahead=k`, step t samples with the weights from the
    end of step t-1-k, or of the last `sync` if that came later; so step t can sample while step t-k trains. Calls of
    `group` run in call order. No method waits: weights travel as references to columns that may still be computed.
    """

    def __init__(self, group: WorkerGroup, trained: WeightExporter, ahead: int) -> None:
        self.group = group
        self._trained = trained
        self._ahead = ahead
        self._sent: deque[tuple[float, DataProto]] = deque()
        self._is_stale = True
        self._is_new = True

    def mark_stale(self) -> None:
        """Note that the trained weights have changed since the last send."""
        self._is_stale = True

    def prepare(self, step: int) -> None:
        """Make the workers take the weights that step `step` samples with."""
        if self._ahead == 0 or self._is_new:
            self.sync()
        else:
            self._take(step - 1 - self._ahead)

    def end_step(self, step: int) -> None:
        """Send the weights of the end of a step; a later step takes them."""
        if self._ahead and not self._is_new:
            self._send(step)

    def sync(self) -> None:
        """Make the workers take the newest weights now, whatever the step."""
        self._is_new = False
        self._send(math.inf)
        self._take(math.inf)

    def _send(self, step: float) -> None:
        # Unchanged weights are not sent again: `_take` then keeps the ones that the workers have.
        if self._is_stale:
            self._sent.append((step, self._trained.send()))
            self._is_stale = False

    def _take(self, step: float) -> None:
        """Take the newest weights sent at the end of `step` or earlier; drop those sent before them."""
        newest: DataProto | None = None
        # Several may have been sent since the last take; only the newest counts, and the others are freed.
        while self._sent and self._sent[0][0] <= step:
            newest = self._sent.popleft()[1]
        if newest is not None:
            self.group.take_weights(newest)
