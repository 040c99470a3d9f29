"""rlcore: post-training of language models with reinforcement learning.

The names below are all that a plugin may import (with `rlcore.ops`). Each is imported when it is first used, so
`import rlcore` itself loads neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.config import Config, option
    from rlcore.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        PluginError,
        RLCoreError,
        WorkerError,
        did_you_mean,
    )
    from rlcore.plugins import (
        CRITIC,
        POLICY,
        REWARD,
        Algorithm,
        AlgorithmSpec,
        CommandSpec,
        ConfigSpec,
        DatasetSpec,
        PluginManager,
        RewardSpec,
        Role,
        RoleKind,
        RolloutCapabilities,
        RolloutEngineSpec,
        TrackerSpec,
        TrainCapabilities,
        TrainEngineSpec,
        WorkerSpec,
        hookimpl,
    )
    from rlcore.protocol import ColumnSpec, DataProto, Ragged
    from rlcore.roles.handles import CriticHandle, PolicyHandle, RewardHandle
    from rlcore.run import Run
    from rlcore.trackers import Tracker

_HOMES = {
    "rlcore.config": ["Config", "option"],
    "rlcore.errors": [
        "CheckpointError",
        "ConfigError",
        "DataError",
        "PluginError",
        "RLCoreError",
        "WorkerError",
        "did_you_mean",
    ],
    "rlcore.plugins": [
        "CRITIC",
        "POLICY",
        "REWARD",
        "Algorithm",
        "AlgorithmSpec",
        "CommandSpec",
        "ConfigSpec",
        "DatasetSpec",
        "PluginManager",
        "RewardSpec",
        "Role",
        "RoleKind",
        "RolloutCapabilities",
        "RolloutEngineSpec",
        "TrackerSpec",
        "TrainCapabilities",
        "TrainEngineSpec",
        "WorkerSpec",
        "hookimpl",
    ],
    "rlcore.protocol": ["ColumnSpec", "DataProto", "Ragged"],
    "rlcore.roles.handles": ["CriticHandle", "PolicyHandle", "RewardHandle"],
    "rlcore.run": ["Run"],
    "rlcore.trackers": ["Tracker"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CRITIC",
    "POLICY",
    "REWARD",
    "Algorithm",
    "AlgorithmSpec",
    "CheckpointError",
    "ColumnSpec",
    "CommandSpec",
    "Config",
    "ConfigError",
    "ConfigSpec",
    "CriticHandle",
    "DataError",
    "DataProto",
    "DatasetSpec",
    "PluginError",
    "PluginManager",
    "PolicyHandle",
    "RLCoreError",
    "Ragged",
    "RewardHandle",
    "RewardSpec",
    "Role",
    "RoleKind",
    "RolloutCapabilities",
    "RolloutEngineSpec",
    "Run",
    "Tracker",
    "TrackerSpec",
    "TrainCapabilities",
    "TrainEngineSpec",
    "WorkerError",
    "WorkerSpec",
    "did_you_mean",
    "hookimpl",
    "option",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rlcore' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
