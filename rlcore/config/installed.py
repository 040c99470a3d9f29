"""What configuration needs to know of the installed plugins. `rlcore.plugins.PluginManager` is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlcore.config.schema import Config


class Installed(Protocol):
    """The names that config values may have, each with its spec, and the plugins' own check."""

    def algorithms(self) -> Mapping[str, Any]:
        """Return the algorithms by name; `.algorithm.config_class` is the class of `algo`."""

    def rewards(self) -> Mapping[str, Any]:
        """Return the reward functions by name."""

    def datasets(self) -> Mapping[str, Any]:
        """Return the data sets by name; `.reward` names the reward function that fits."""

    def rollout_engines(self) -> Mapping[str, Any]:
        """Return the rollout engines by name."""

    def train_engines(self) -> Mapping[str, Any]:
        """Return the train engines by name."""

    def configs(self) -> Mapping[str, Any]:
        """Return the config sections of plugins by name."""

    def sections(self) -> Mapping[str, type]:
        """Return the config classes that plugins bring, by dotted name: `judge`, `rollout.NAME`, `engine.NAME`."""

    def trackers(self) -> Mapping[str, Any]:
        """Return the trackers by name."""

    def list(self) -> Sequence[Any]:
        """Return the plugins, each with `name`, `state`, `distribution`, `version` and `file`."""

    def used_by(self, config: Config) -> Sequence[Any]:
        """Return those of the plugins without which a run of this config cannot go on."""

    def check_config(self, config: Config) -> None:
        """Raise ConfigError where a plugin refuses the config."""
