"""The plugin `rollout=vllm`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rlcore import ConfigError, RolloutCapabilities, RolloutEngineSpec, hookimpl
from rlcore.engines.vllm.config import VLLMConfig

if TYPE_CHECKING:
    from rlcore import Config
    from rlcore.engine.rollout import RolloutEngine, RolloutSetup

RLCORE_API = 1


def create_vllm(setup: RolloutSetup[VLLMConfig]) -> RolloutEngine:
    """Make the engine. It keeps a copy of the weights, as it cannot use the train engine's module."""
    from rlcore.engines.vllm.rollout import VLLMRollout

    return VLLMRollout(
        setup.model,
        config=setup.config,
        device=setup.device,
        tensor_group=setup.tensor_group,
        engine_order=setup.engine_order,
        beside_training=setup.beside_training,
        training_bytes=setup.training_bytes,
        kept_bytes=setup.kept_bytes,
        gpu_share=setup.gpu_share,
        row_tokens=setup.row_tokens,
    )


def check(config: Config) -> None:
    """Raise ConfigError where vLLM is not installed, or in a version that rlcore does not work with."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.name = vllm, but vLLM is not installed: pip install vllm (on a machine without GPUs as "
            "docs/rollout.md says), or choose rollout=hf"
        )
    from rlcore.engines.vllm.internals import check_version

    check_version()


@hookimpl
def rlcore_rollout_engines() -> RolloutEngineSpec[VLLMConfig]:
    """Register `rollout=vllm`."""
    capabilities = RolloutCapabilities(tensor_shards=True, continuous_batching=True, cache_key="rollout.vllm.memory")
    return RolloutEngineSpec("vllm", create_vllm, VLLMConfig, capabilities, check)
