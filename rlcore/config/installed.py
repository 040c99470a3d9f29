"""The interface through which configs see the installed plugins; `rlcore.plugins.PluginManager` implements it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from rlcore.config.schema import Config


class Installed(Protocol):
    """The options and config classes that plugins bring."""

    def algorithms(self) -> Mapping[str, Any]:
        """Return the algorithms by name; `.algorithm.config_class` is the class of `algo`."""

    def options(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """Return the options that plugins add to config groups: the values that GROUP=NAME sets, by group and name."""

    def sections(self) -> Mapping[str, type]:
        """Return the config classes that plugins bring, by dotted name: `judge`, `rollout.NAME`, `engine.NAME`."""

    def used_sections(self, config: Config) -> Collection[str]:
        """Return the names of the sections that a run of this config has: of engines those that one of its roles uses.

        `config` has those of all engines and plugins.
        """
