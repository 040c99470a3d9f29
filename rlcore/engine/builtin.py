"""The engines that come with rlcore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcore import ConfigError, RolloutEngineSpec, TrainEngineSpec, hookimpl
from rlcore.errors import did_you_mean

if TYPE_CHECKING:
    from rlcore import Config

RLCORE_API = 1

ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def create_fsdp(**kwargs: Any) -> Any:
    """Make an FSDPEngine."""
    from rlcore.engine.train.fsdp import FSDPEngine

    return FSDPEngine(**kwargs)


def create_hf(**kwargs: Any) -> Any:
    """Make an HFRollout."""
    from rlcore.engine.rollout.hf import HFRollout

    return HFRollout(**kwargs)


@hookimpl
def rlcore_train_engines() -> list[TrainEngineSpec]:
    """Register `engine=fsdp`."""
    return [TrainEngineSpec("fsdp", create_fsdp)]


@hookimpl
def rlcore_rollout_engines() -> list[RolloutEngineSpec]:
    """Register `rollout=hf`."""
    return [RolloutEngineSpec("hf", create_hf)]


@hookimpl
def rlcore_check_config(config: Config) -> None:
    """Refuse attention implementations that do not exist or cannot run as the config stands."""
    attention = config.model.attention
    if attention not in ATTENTION:
        raise ConfigError(
            f"model.attention={attention!r} is unknown.{did_you_mean(attention, ATTENTION)} "
            f"Allowed: {', '.join(ATTENTION)}"
        )
    if attention.startswith("flash") and (config.cluster.gpus_per_worker == 0 or config.model.dtype != "bf16"):
        raise ConfigError(
            f"model.attention={attention} needs GPUs and bf16; set cluster.gpus_per_worker=1 and model.dtype=bf16, or "
            "leave model.attention=auto"
        )
