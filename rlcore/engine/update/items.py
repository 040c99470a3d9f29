"""The input of an update: batches with their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.ops import Correction, Loss
from rlcore.protocol import DataProto


@dataclass(frozen=True)
class Importance:
    """How tokens are weighted by importance ratios; see `rlcore.ops.importance_weights`.

    `cap` bounds the ratios from above. `floor` is the lower end of the band that kind "mask" keeps.
    """

    kind: Correction
    cap: float
    floor: float = 0.0


@dataclass(frozen=True)
class UpdateItem:
    """One batch with its loss. Several items may share an optimizer step, each with its `weight`.

    `batch` holds this rank's rows, one mini-batch after another. `sizes` is the number of rows of each mini-batch; all
    items of an update have the same number of mini-batches. `loss` gets `config`, the algorithm's own. Rows with equal
    values in the column `keep_together` stay in one micro-batch. `importance` corrects for samples of another policy
    than the trained one; None turns the correction off.
    """

    batch: DataProto
    sizes: Sequence[int]
    loss: Loss
    config: Any
    weight: float = 1.0
    keep_together: str | None = None
    importance: Importance | None = None

    def mini_batch(self, index: int) -> DataProto:
        """Return this rank's rows of one mini-batch."""
        start = sum(self.sizes[:index])
        return self.batch[start : start + self.sizes[index]]
