"""Exports the weights of a role's workers for the workers of another role."""

from __future__ import annotations

import torch

from rlcore.engine.weights.transfer import object_column
from rlcore.protocol import DataProto
from rlcore.workers import WorkerGroup


class WeightExporter:
    """Exports full parameters of a role's ModelWorkers in one `dtype`; rank r packs the r-th part of them.

    The controller gets references and never waits, except for the parameters' names at the first `send`.
    """

    def __init__(self, group: WorkerGroup, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._names: DataProto | None = None

    def send(self) -> DataProto:
        """Return the weights after all earlier calls, in the columns of `pack_weights`."""
        # Asked once: the names never change, and the call waits for the workers.
        if self._names is None:
            self._names = DataProto.from_single_dict({"name": object_column(self._group.parameter_names())})
        return self._group.send_weights(self._names, self._dtype)
