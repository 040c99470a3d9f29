"""The plugin contract: hooks, specs, and the manager that loads and calls plugins. Imports no torch."""

from rlcore.plugins import specs
from rlcore.plugins.algorithm import Algorithm
from rlcore.plugins.entries import PluginInfo, command_of, distribution_of, installed
from rlcore.plugins.hookspecs import hookimpl
from rlcore.plugins.manager import PluginManager, own_engines, own_sections
from rlcore.plugins.roles import CRITIC, KINDS, POLICY, REWARD, Head, Role, RoleKind
from rlcore.plugins.specs import *  # noqa: F403
from rlcore.plugins.specs import API_VERSION, PLUGIN_KINDS

__all__ = [
    "API_VERSION",
    "CRITIC",
    "KINDS",
    "PLUGIN_KINDS",
    "POLICY",
    "REWARD",
    "Algorithm",
    "Head",
    "PluginInfo",
    "PluginManager",
    "Role",
    "RoleKind",
    "command_of",
    "distribution_of",
    "hookimpl",
    "installed",
    "own_engines",
    "own_sections",
]
__all__ += specs.__all__
