"""The plugin `engine=torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore import TrainCapabilities, TrainEngineSpec, hookimpl
from rlcore.engine.attention import check_attention
from rlcore.engines.torch.config import TorchConfig, check_layout
from rlcore.plugins import KINDS

if TYPE_CHECKING:
    from rlcore.engine.train import TrainEngine, TrainSetup

RLCORE_API = 1


def create_torch(setup: TrainSetup[TorchConfig]) -> TrainEngine:
    """Make the engine."""
    from rlcore.engines.torch.engine import TorchEngine

    return TorchEngine(setup)


@hookimpl
def rlcore_train_engines() -> TrainEngineSpec[TorchConfig]:
    """Register `engine=torch`."""
    return TrainEngineSpec(
        "torch",
        create_torch,
        TorchConfig,
        TrainCapabilities(
            kinds=KINDS,
            layouts=True,
            offload=True,
            adapters=True,
            settings={
                "shard": "engine.torch.shard",
                "recompute": "engine.torch.activation_checkpointing",
                "layerwise_above": "engine.torch.layerwise_above",
                "logits_chunk": "engine.torch.logits_chunk",
                "padding_free": "engine.torch.padding_free",
            },
        ),
        check_attention,
        check_layout,
    )
