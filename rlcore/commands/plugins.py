"""`rlcore plugins`: list the plugins with all their faults."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rlcore import CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine
from rlcore.plugins import PluginInfo, PluginManager

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    # Words are an error, which says where `rlcore plugins test NAME [--set KEY=VALUE]` is.
    parser.add_argument("--set", action="append", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def run(line: CommandLine) -> int:
    """List the plugins; 2 when one of them is broken."""
    options = line.options
    if options.words:
        raise ConfigError(
            f"unknown words {' '.join(options.words)!r}: rlcore plugins takes none. rlcore plugins test NAME is in a "
            "distribution of its own: pip install rlcore-plugin-testing (in a checkout: "
            "pip install -e plugins/rlcore-plugin-testing)"
        )
    found = PluginManager.inspect(options.plugin, trace=options.trace_hooks).list()
    broken = [info for info in found if info.faults]
    if options.json:
        CommandLine.show(json.dumps([dataclasses.asdict(info) for info in found], indent=2))
    else:
        CommandLine.show("\n".join(_row(info) for info in found))
        if broken:
            CommandLine.show(f"\n{len(broken)} of {len(found)} broken; -p no:NAME leaves one out")
    return 2 if broken else 0


def _row(info: PluginInfo) -> str:
    origin = f"{info.distribution} {info.version}" if info.distribution else f"sha256 {info.sha256}"
    lines = [
        f"{info.name}  [{info.kind}, {info.state}]  {origin}",
        f"    file   {info.file or 'not loaded'}",
        f"    hooks  {', '.join(info.hooks) or 'none'}",
    ]
    if info.gives:
        lines.append(f"    gives  {', '.join(info.gives)}")
    lines += [f"    FAULT  {fault}" for fault in info.faults]
    return "\n".join(lines)


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore plugins`."""
    return CommandSpec("plugins", SUMMARIES["plugins"], run=run, options=add_options, config=False)
