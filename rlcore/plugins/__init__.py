"""The plugin contract: hooks, what plugins hand over, and the manager that loads and calls them. Imports no torch."""

from rlcore.plugins.hookspecs import hookimpl
from rlcore.plugins.manager import PluginInfo, PluginManager, installed
from rlcore.plugins.specs import (
    API_VERSION,
    Algorithm,
    AlgorithmSpec,
    CommandSpec,
    ConfigSpec,
    DatasetSpec,
    RewardSpec,
    Role,
    RolloutCapabilities,
    RolloutEngineSpec,
    TrackerSpec,
    TrainCapabilities,
    TrainEngineSpec,
)

__all__ = [
    "API_VERSION",
    "Algorithm",
    "AlgorithmSpec",
    "CommandSpec",
    "ConfigSpec",
    "DatasetSpec",
    "PluginInfo",
    "PluginManager",
    "RewardSpec",
    "Role",
    "RolloutCapabilities",
    "RolloutEngineSpec",
    "TrackerSpec",
    "TrainCapabilities",
    "TrainEngineSpec",
    "hookimpl",
    "installed",
]
