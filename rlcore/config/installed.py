"""The interface through which configs see the installed plugins; `rlcore.plugins.PluginManager` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Installed(Protocol):
    """The options and config classes that plugins bring."""

    def algorithms(self) -> Mapping[str, Any]:
        """Return the algorithms by name; `.algorithm.config_class` is the class of `algo`."""

    def options(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """Return the options that plugins add to config groups: the values that GROUP=NAME sets, by group and name."""

    def sections(self) -> Mapping[str, type]:
        """Return the config classes that plugins bring, by dotted name: `judge`, `rollout.NAME`, `engine.NAME`."""
