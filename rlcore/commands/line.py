"""The parsed command line of a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.config import Config
    from rlcore.plugins import PluginManager


class CommandLine:
    """The argument of a command's `run`: its parsed options, and the plugins and the config that follow from them.

    `options` holds rlcore's options and the command's own; `overrides` the words GROUP=OPTION and KEY=VALUE.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.overrides: list[str] = getattr(options, "overrides", [])

    @cached_property
    def plugins(self) -> PluginManager:
        """The plugins, loaded at first use. Raises PluginError for a broken one."""
        from rlcore.plugins import PluginManager

        return PluginManager.load(self.options.plugin, trace=self.options.trace_hooks)

    def compose(self, overrides: Sequence[str] | None = None, *, base: dict[str, Any] | None = None) -> Config:
        """Return the config of `--config`, `--config-dir` and the overrides, not yet checked.

        overrides: replace those of the command line. base: plain values to start from; replaces `--config`.
        Raises PluginError when the run of `--config` needs a plugin that is not installed.
        """
        from rlcore.config import compose
        from rlcore.workers.gpus import find_gpus

        overrides = self.overrides if overrides is None else overrides
        if self.options.config_dir:
            folder = Path(self.options.config_dir).resolve()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {self.options.config_dir} is not a folder")
            overrides = [*overrides, f"hydra.searchpath=['file://{folder}']"]
        return compose(overrides, self.plugins, base=self.saved() if base is None else base, find_gpus=find_gpus)

    def saved(self) -> dict[str, Any] | None:
        """Return the plain values of the file `--config`, None without that option."""
        if not self.options.config:
            return None
        from rlcore.config.files import read_values
        from rlcore.training.folder import require_plugins

        file = Path(self.options.config)
        require_plugins(file.parent, self.plugins)
        return read_values(file)

    @staticmethod
    def show(text: str) -> None:
        """Print to stdout; a reader may close the pipe early (`| head`)."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            # Python flushes stdout once more when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
