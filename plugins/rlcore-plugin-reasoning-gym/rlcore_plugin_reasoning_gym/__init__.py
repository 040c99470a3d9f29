"""reasoning-gym for rlcore: its generators as a data set, its verifiers as a reward, and both as an environment.

This module is the plugin. It imports reasoning-gym (a second) only where rows are scored.
"""

from __future__ import annotations

from rlcore import DatasetSpec, EnvironmentSpec, RewardSpec, hookimpl
from rlcore_plugin_reasoning_gym.config import AttemptsConfig, TasksConfig
from rlcore_plugin_reasoning_gym.environment import ReasoningGym
from rlcore_plugin_reasoning_gym.rows import load
from rlcore_plugin_reasoning_gym.verify import score

RLCORE_API = 1
VERIFY = ("reasoning_gym", "rlcore_plugin_reasoning_gym.verify")


@hookimpl
def rlcore_datasets() -> DatasetSpec[TasksConfig]:
    """Register the data set, with the keys `data.reasoning_gym.*`."""
    return DatasetSpec("reasoning_gym", load, reward="reasoning_gym", config_class=TasksConfig)


@hookimpl
def rlcore_rewards() -> RewardSpec:
    """Register the verifiers as one reward."""
    return RewardSpec("reasoning_gym", score, imports=VERIFY)


@hookimpl
def rlcore_environments() -> EnvironmentSpec[AttemptsConfig]:
    """Register the environment, with the keys `env.reasoning_gym.*`."""
    return EnvironmentSpec("reasoning_gym", ReasoningGym, config_class=AttemptsConfig, imports=VERIFY)
