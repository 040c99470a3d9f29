"""The engines that come with rlcore."""

from __future__ import annotations

from typing import Any

from rlcore import RolloutEngineSpec, TrainEngineSpec, hookimpl

RLCORE_API = 1


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
