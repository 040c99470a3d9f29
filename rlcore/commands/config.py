"""`rlcore config`: compose, check and print a config, or list the keys."""

from __future__ import annotations

import argparse

from rlcore import CommandSpec, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--keys", action="store_true", help="show all keys with type, default and meaning")
    parser.add_argument("--resumable", action="store_true", help="show the keys that may change when a run is resumed")


def run(line: CommandLine) -> int:
    """Print the checked config in the form that a run saves."""
    if line.options.keys or line.options.resumable:
        from rlcore.config.reference import CORE_SECTIONS, text

        sections = {**CORE_SECTIONS, **line.plugins.sections()}
        line.show(text(sections, only_resumable=line.options.resumable))
        return 0
    config = line.compose()
    from rlcore.config import to_yaml
    from rlcore.training.preflight import preflight

    preflight(config, line.plugins)
    line.show(to_yaml(config).rstrip("\n"))
    return 0


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore config`."""
    return CommandSpec("config", SUMMARIES["config"], run=run, options=add_options)
