"""The plugin contract: hooks, what plugins hand over, and the manager that loads and calls them. Imports no torch."""

from rlcore.plugins.hookspecs import hookimpl
from rlcore.plugins.manager import PluginInfo, PluginManager, installed
from rlcore.plugins.roles import CRITIC, KINDS, POLICY, REWARD, Head, Role, RoleKind
from rlcore.plugins.specs import (
    API_VERSION,
    Algorithm,
    AlgorithmSpec,
    CommandSpec,
    DatasetSpec,
    RewardSpec,
    RolloutEngineSpec,
    TrackerSpec,
    TrainEngineSpec,
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
    "DatasetSpec",
    "Head",
    "PluginInfo",
    "PluginManager",
    "RewardSpec",
    "Role",
    "RoleKind",
    "RolloutEngineSpec",
    "TrackerSpec",
    "TrainEngineSpec",
    "hookimpl",
    "installed",
]
