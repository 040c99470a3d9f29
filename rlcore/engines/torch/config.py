"""The torch engine's own config: the keys `engine.torch.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.config import option
from rlcore.engine.parallel.layout import Layout
from rlcore.errors import ConfigError


@dataclass(frozen=True)
class TorchConfig:
    """How the torch engine shards a model and trades memory for speed."""

    shard: int = option(
        0,
        "data-parallel ranks that share one copy of the weights (FSDP); 0: all ranks, 1: a copy on each rank",
        min=0,
        was="engine.shard",
        incidental=True,
    )
    logits_chunk: int = option(
        4096, "positions whose logits are in memory at one time", min=1, was="engine.logits_chunk"
    )
    compile: Literal["auto", "off"] = option(
        "auto",
        "compile layers and passes over logits, on a GPU for a model of 100 million parameters and more; off: neither",
    )
    padding_free: bool = option(
        True, "pack sequences without padding where the model's attention allows it", was="engine.padding_free"
    )
    layerwise_above: int = option(
        50_000_000,
        "a model of more parameters is sharded layer by layer, a smaller one in one piece",
        min=0,
        was="engine.layerwise_above",
    )
    activation_checkpointing: bool = option(
        False,
        "recompute each layer in backward instead of keeping its activations",
        was="engine.activation_checkpointing",
    )


def check_layout(config: TorchConfig, layout: Layout) -> None:
    """Raise ConfigError where the engine's config does not fit a role's layout."""
    if layout.pp > 1 and not config.padding_free:
        raise ConfigError(
            f"engine.pp={layout.pp} needs engine.torch.padding_free=true: pipeline stages exchange packed sequences"
        )
    if config.shard and layout.dp % config.shard:
        allowed = ", ".join(str(n) for n in range(1, layout.dp + 1) if layout.dp % n == 0)
        raise ConfigError(
            f"engine.torch.shard={config.shard} does not divide the {layout.dp} data-parallel ranks; allowed: 0, "
            f"{allowed}"
        )
