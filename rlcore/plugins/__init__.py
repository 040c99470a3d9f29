"""The plugin contract: hooks, what plugins hand over, and the manager that loads and calls them. Imports no torch."""

from rlcore.plugins.hookspecs import hookimpl
from rlcore.plugins.manager import PluginInfo, PluginManager, installed, own_engines
from rlcore.plugins.roles import CRITIC, KINDS, POLICY, REWARD, Head, Role, RoleKind
from rlcore.plugins.specs import (
    API_VERSION,
    Algorithm,
    AlgorithmSpec,
    CommandSpec,
    ConfigSpec,
    DatasetSpec,
    RewardSpec,
    RolloutCapabilities,
    RolloutEngineSpec,
    TrackerSpec,
    TrainCapabilities,
    TrainEngineSpec,
    WorkerSpec,
)

__all__ = [
    "API_VERSION",
    "CRITIC",
    "KINDS",
    "POLICY",
    "REWARD",
    "Algorithm",
    "AlgorithmSpec",
    "CommandSpec",
    "ConfigSpec",
    "DatasetSpec",
    "Head",
    "PluginInfo",
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
    "installed",
    "own_engines",
]
