"""rlcore: post-training of language models with reinforcement learning.

A plugin may import the names below and `rlcore.ops`. One that brings an engine also imports `rlcore.engine`, one with
workers of its own `rlcore.workers`, one with an environment `rlcore.episodes`, and one that plans placements
`rlcore.planning`. A program that trains uses `train` and `load_run`. Each name is imported at its first use, so
`import rlcore` itself loads neither torch nor ray.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.commands.line import CommandLine
    from rlcore.config import Config, DataConfig, option
    from rlcore.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        PluginError,
        RewardsError,
        RLCoreError,
        WeightsError,
        WorkerError,
        did_you_mean,
    )
    from rlcore.plugins import (
        CRITIC,
        POLICY,
        REWARD,
        Algorithm,
        PluginManager,
        Role,
        RoleKind,
        hookimpl,
        specs,
    )
    from rlcore.plugins.specs import *  # noqa: F403
    from rlcore.protocol import ColumnSpec, DataProto, Ragged
    from rlcore.python import load_run, train
    from rlcore.roles.handles import CriticHandle, PolicyHandle, RewardHandle
    from rlcore.trackers import Tracker
    from rlcore.training.run import Run

    __all__ = [
        "CRITIC",
        "POLICY",
        "REWARD",
        "Algorithm",
        "CheckpointError",
        "ColumnSpec",
        "CommandLine",
        "Config",
        "ConfigError",
        "CriticHandle",
        "DataConfig",
        "DataError",
        "DataProto",
        "PluginError",
        "PluginManager",
        "PolicyHandle",
        "RLCoreError",
        "Ragged",
        "RewardHandle",
        "RewardsError",
        "Role",
        "RoleKind",
        "Run",
        "Tracker",
        "WeightsError",
        "WorkerError",
        "did_you_mean",
        "hookimpl",
        "load_run",
        "option",
        "train",
    ]
    __all__ += specs.__all__

_HOMES = {
    "rlcore.commands.line": ["CommandLine"],
    "rlcore.config": ["Config", "DataConfig", "option"],
    "rlcore.errors": [
        "CheckpointError",
        "ConfigError",
        "DataError",
        "PluginError",
        "RLCoreError",
        "RewardsError",
        "WeightsError",
        "WorkerError",
        "did_you_mean",
    ],
    "rlcore.plugins": [
        "CRITIC",
        "POLICY",
        "REWARD",
        "Algorithm",
        "PluginManager",
        "Role",
        "RoleKind",
        "hookimpl",
    ],
    "rlcore.protocol": ["ColumnSpec", "DataProto", "Ragged"],
    "rlcore.python": ["load_run", "train"],
    "rlcore.roles.handles": ["CriticHandle", "PolicyHandle", "RewardHandle"],
    "rlcore.training.run": ["Run"],
    "rlcore.trackers": ["Tracker"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if not name.startswith("_") and name in _kinds().__all__:
        return getattr(_kinds(), name)
    raise AttributeError(f"module 'rlcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME_OF, *_kinds().__all__])


def _kinds() -> ModuleType:
    """Return the module with the specs of the plugin kinds."""
    return importlib.import_module("rlcore.plugins.specs")
