"""The plugin `rollout=hf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore import RolloutCapabilities, RolloutEngineSpec, hookimpl
from rlcore.engine.attention import check_attention
from rlcore.engines.hf.config import HFConfig

if TYPE_CHECKING:
    from rlcore.engine.rollout import RolloutEngine, RolloutSetup

RLCORE_API = 1


def create_hf(setup: RolloutSetup[HFConfig]) -> RolloutEngine:
    """Make the engine. It ignores `engine_order`: its groups are torch's, in any order."""
    from rlcore.engines.hf.rollout import HFRollout

    return HFRollout(
        setup.model,
        batch_size=setup.config.batch_size,
        graphs=setup.config.graphs,
        device=setup.device,
        shared=setup.shared,
        tensor_group=setup.tensor_group,
    )


@hookimpl
def rlcore_rollout_engines() -> RolloutEngineSpec[HFConfig]:
    """Register `rollout=hf`."""
    capabilities = RolloutCapabilities(
        tensor_shards=True,
        continuous_batching=True,
        adopts_weights=True,
        shares_module=True,
        slots_key="rollout.hf.batch_size",
    )
    return RolloutEngineSpec("hf", create_hf, HFConfig, capabilities, check_attention)
