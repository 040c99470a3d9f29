"""The plugin contract: hooks, what plugins hand over, and the manager that loads and calls them. Imports no torch."""

from rlcore.plugins.hookspecs import hookimpl
from rlcore.plugins.manager import PluginInfo, PluginManager, installed
from rlcore.plugins.specs import (
    API_VERSION,
    Algorithm,
    AlgorithmSpec,
    CommandSpec,
    DatasetSpec,
    RewardSpec,
    Role,
    RolloutEngineSpec,
    TrackerSpec,
    TrainEngineSpec,
)

__all__ = [
    "API_VERSION",
    "Algorithm",
    "AlgorithmSpec",
    "CommandSpec",
    "DatasetSpec",
    "PluginInfo",
    "PluginManager",
    "RewardSpec",
    "Role",
    "RolloutEngineSpec",
    "TrackerSpec",
    "TrainEngineSpec",
    "hookimpl",
    "installed",
]
