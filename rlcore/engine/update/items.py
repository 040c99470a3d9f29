"""The input of an update: batches with their losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.ops import LOG_RATIO_BOUND, Correction, Loss
from rlcore.protocol import DataProto


@dataclass(frozen=True)
class Importance:
    """How tokens are weighted by importance ratios; see `rlcore.ops.importance_weights`.

    `cap` bounds the ratios of "token" and "sequence" from above. `band` holds the ratios that the masks keep.
    """

    kind: Correction
    cap: float = math.inf
    band: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True)
class Numerics:
    """What an update does about numbers that overflow: `trainer.log_ratio_bound` and `trainer.on_nonfinite`."""

    log_ratio_bound: float = LOG_RATIO_BOUND
    on_nonfinite: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class UpdateItem:
    """One batch with its loss. Several items may share an optimizer step, each with its `weight`.

    `batch` holds this rank's rows, one mini-batch after another. `sizes` is the number of rows of each mini-batch; all
    items of an update have the same number of mini-batches. `loss` gets `config`, the algorithm's own. Rows with equal
    values in the column `keep_together` stay in one micro-batch. `importance` corrects for samples of another policy
    than the trained one; None turns the correction off. `numerics` is the same in all items of an update. `constants`
    are numbers that the loss reads beside the columns, by name.
    """

    batch: DataProto
    sizes: Sequence[int]
    loss: Loss
    config: Any
    weight: float = 1.0
    keep_together: str | None = None
    importance: Importance | None = None
    numerics: Numerics = Numerics()
    constants: Mapping[str, float] = field(default_factory=dict)

    def mini_batch(self, index: int) -> DataProto:
        """Return this rank's rows of one mini-batch."""
        start = sum(self.sizes[:index])
        return self.batch[start : start + self.sizes[index]]
