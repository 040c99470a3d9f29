"""verifiers for rlcore: its tasksets as a data set and as an environment.

This module is the plugin. It imports verifiers (seconds) only where a taskset is used.
"""

from __future__ import annotations

from rlcore import DatasetSpec, EnvironmentSpec, hookimpl
from rlcore_plugin_verifiers.config import TasksetConfig
from rlcore_plugin_verifiers.environment import load_environment
from rlcore_plugin_verifiers.rows import load

RLCORE_API = 1
LOADED = ("verifiers.v1.trace", "mcp.server.mcpserver")
"""What an environment process imports once, before it forks one for each episode."""


@hookimpl
def rlcore_datasets() -> DatasetSpec[TasksetConfig]:
    """Register the data set, with the keys `data.verifiers.*`."""
    return DatasetSpec("verifiers", load, reward="environment", config_class=TasksetConfig)


@hookimpl
def rlcore_environments() -> EnvironmentSpec[None]:
    """Register the environment of the taskset at `data.verifiers.taskset`."""
    return EnvironmentSpec("verifiers", load=load_environment, scores=True, imports=LOADED)
