"""textarena for rlcore: its games as an environment, against itself or a random opponent, and a data set of seeds.

This module is the plugin. It imports textarena (half a second) only for runs with `env=textarena`.
"""

from __future__ import annotations

from typing import Any

from rlcore import Config, DatasetSpec, EnvironmentSpec, hookimpl
from rlcore_plugin_textarena.config import GameConfig, SeedsConfig
from rlcore_plugin_textarena.seeds import load

RLCORE_API = 1


@hookimpl
def rlcore_datasets() -> DatasetSpec[SeedsConfig]:
    """Register the data set: one row for each seed of a game."""
    return DatasetSpec("textarena", load, reward="environment", config_class=SeedsConfig)


@hookimpl
def rlcore_environments() -> EnvironmentSpec[GameConfig]:
    """Register the environment, with the keys `env.textarena.*`."""
    return EnvironmentSpec(
        "textarena",
        load=_environment,
        config_class=GameConfig,
        imports=("textarena", "numpy"),
        scores=True,
        check=_check,
    )


def _environment(config: Config) -> type[Any]:
    from rlcore_plugin_textarena.environment import environment_class

    return environment_class(config.section(GameConfig))


def _check(config: Config) -> None:
    from rlcore_plugin_textarena.games import check

    check(config.section(GameConfig))
