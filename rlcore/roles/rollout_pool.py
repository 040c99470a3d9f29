"""Sampling on processes of its own: which weights are sent there, and when it takes them."""

from __future__ import annotations

import math
from collections import deque

from rlcore.protocol import DataProto
from rlcore.roles.weight_exporter import WeightExporter
from rlcore.workers import WorkerGroup


class RolloutCopy:
    """The workers that sample in a role's place, `ahead` steps before its training at most (trainer.rollouts_ahead).

    `ahead` 0: they always sample with the newest weights. `ahead` k: in step t with those of the end of step t - 1 - k,
    or of the last `sync` if that was later, so that step t can sample while step t - k trains. `group` calls sample in
    the order in which they are made here, and nothing waits here: weights travel as references to what is still to be
    made.
    """

    def __init__(self, group: WorkerGroup, trained: WeightExporter, ahead: int) -> None:
        self.group = group
        self._trained = trained
        self._ahead = ahead
        self._sent: deque[tuple[float, DataProto]] = deque()
        self._changed = True
        self._is_new = True

    def changed(self) -> None:
        """Note that the trained weights are no longer those that were sent last."""
        self._changed = True

    def before_generate(self, step: int) -> None:
        """Have the workers take the weights that step `step` samples with."""
        if self._ahead == 0 or self._is_new:
            self.sync()
        else:
            self._take(step - 1 - self._ahead)

    def end_step(self, step: int) -> None:
        """Send the weights of the end of a step, for a later one to take."""
        if self._ahead and not self._is_new:
            self._send(step)

    def sync(self) -> None:
        """Have the workers take the newest weights now, whatever the step."""
        self._is_new = False
        self._send(math.inf)
        self._take(math.inf)

    def _send(self, step: float) -> None:
        if self._changed:
            self._sent.append((step, self._trained.send()))
            self._changed = False

    def _take(self, step: float) -> None:
        """Take the newest weights sent at the end of `step` or before; forget those, and what was sent before them."""
        newest: DataProto | None = None
        while self._sent and self._sent[0][0] <= step:
            newest = self._sent.popleft()[1]
        if newest is not None:
            self.group.take_weights(newest)
