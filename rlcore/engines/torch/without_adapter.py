"""The model beneath an adapter as an engine of its own, such as the reference of a policy that trains an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.engine.adapter import as_started
from rlcore.engine.model_folder import write_model_folder
from rlcore.engine.parallel.layout import ShardSpec
from rlcore.engine.train import Approve, Finish, TrainEngine
from rlcore.engine.weights.transfer import Shapes
from rlcore.errors import DataError
from rlcore.ops import Need
from rlcore.protocol import DataProto

if TYPE_CHECKING:
    from rlcore.engines.torch.engine import TorchEngine

NO_TRAINING = "this engine computes without its adapter and does not train"
NO_WEIGHTS = "this engine has no weights of its own: they belong to the role that trains an adapter on them"


class WithoutAdapter(TrainEngine):
    """An engine's model with its adapters as they started, frozen: a reference that takes no memory of its own.

    `engine` owns the weights, and moves them between memories.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        for name in ("engine_config", "micro_batch_tokens", "config", "model_config", "ranks", "kind", "temperature"):
            setattr(self, name, getattr(engine, name))
        self.total_steps, self.dtype, self.mesh = engine.total_steps, engine.dtype, engine.mesh
        self.trains = False
        self.description = f"{engine.model.description}, on the weights of the adapter's base"

    def forward(self, parts: Sequence[DataProto | None], needs: Sequence[Need], finish: Finish) -> None:
        """See TrainEngine."""
        with as_started(self._engine.adapted.values()):
            self._engine.forward(parts, needs, finish)

    def forward_backward(
        self, parts: Sequence[DataProto | None], needs: Sequence[Need], finish: Finish, *, last: bool
    ) -> None:
        """See TrainEngine. Raises DataError: it does not train."""
        raise DataError(NO_TRAINING)

    def zero_grad(self) -> None:
        """See TrainEngine. The gradients are the engine's."""

    def step(self, lr: float, approve: Approve) -> None:
        """See TrainEngine. Raises DataError: it does not train."""
        raise DataError(NO_TRAINING)

    @property
    def shapes(self) -> Shapes:
        """See TrainEngine."""
        return self._engine.shapes

    @property
    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """See TrainEngine."""
        return self._engine.shard_specs

    @property
    def vocab_size(self) -> int:
        """See TrainEngine."""
        return self._engine.vocab_size

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        return ((name, tensor.to(dtype)) for name, tensor in self._engine.masters_as_started())

    def load(self, weights: Mapping[str, Tensor], shapes: Shapes, tau: float) -> None:
        """See TrainEngine. Raises DataError: the weights are those of another role."""
        raise DataError(NO_WEIGHTS)

    def save_pretrained(self, folder: Path) -> None:
        """See TrainEngine."""
        write_model_folder(self._engine.model.hf, self.export(torch.float32), self.model_config, folder, self.ranks)

    def save(self, folder: Path) -> None:
        """See TrainEngine. Raises DataError: the weights are those of another role."""
        raise DataError(NO_WEIGHTS)

    def restore(self, folder: Path) -> None:
        """See TrainEngine. Raises DataError: the weights are those of another role."""
        raise DataError(NO_WEIGHTS)
