"""The engines that come with rlcore."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from rlcore import ConfigError, RolloutEngineSpec, TrainEngineSpec, hookimpl
from rlcore.errors import did_you_mean

if TYPE_CHECKING:
    from rlcore import Config
    from rlcore.config import RolloutConfig

RLCORE_API = 1

ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def create_fsdp(**kwargs: Any) -> Any:
    """Make an TorchEngine."""
    from rlcore.engine.train import TrainSetup
    from rlcore.engines.torch.engine import TorchEngine

    return TorchEngine(TrainSetup(config=None, **kwargs))


def create_hf(*, rollout: RolloutConfig, engine_order: Any = (), **kwargs: Any) -> Any:
    """Make an HFRollout, whose groups are those of torch whatever their order."""
    from rlcore.engines.hf.rollout import HFRollout

    return HFRollout(batch_size=rollout.batch_size, **kwargs)


def create_vllm(*, shared: Any, **kwargs: Any) -> Any:
    """Make a VLLMRollout, which cannot share a module."""
    from rlcore.engines.vllm.rollout import VLLMRollout

    return VLLMRollout(**kwargs)


@hookimpl
def rlcore_train_engines() -> list[TrainEngineSpec]:
    """Register `engine=fsdp`."""
    return [TrainEngineSpec("fsdp", create_fsdp)]


@hookimpl
def rlcore_rollout_engines() -> list[RolloutEngineSpec]:
    """Register `rollout=hf` and `rollout=vllm`."""
    return [RolloutEngineSpec("hf", create_hf), RolloutEngineSpec("vllm", create_vllm)]


@hookimpl
def rlcore_check_config(config: Config) -> None:
    """Refuse a rollout engine that is not installed, and attention that does not exist or cannot run as things are."""
    if config.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.name = vllm, but vLLM is not installed: pip install vllm (on a machine without GPUs as "
            "docs/rollout.md says), or choose rollout=hf"
        )
    if config.rollout.tp > 1 and config.rollout.name not in ("hf", "vllm"):
        raise ConfigError(
            f"rollout.tp={config.rollout.tp}: only rollout=hf and rollout=vllm can load shards of a model; "
            f"rollout={config.rollout.name} has whole ones, so set rollout.tp=1 or choose one of them"
        )
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
