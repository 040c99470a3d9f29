"""`rlcore plugins`: the plugins with all their faults, and conformance suites."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rlcore import CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine
from rlcore.plugins import PluginInfo, PluginManager

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for test: config of its runs")
    parser.add_argument("words", nargs="*", metavar="test NAME", help="run a conformance suite: NAME or GROUP=NAME")


def run(line: CommandLine) -> int:
    """List the plugins; 2 when one of them is broken."""
    options = line.options
    if options.words:
        return _test(options)
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


def _test(options: argparse.Namespace) -> int:
    """Print a plugin's report card; 1 when a check fails."""
    if options.words[0] != "test" or len(options.words) != 2:
        raise ConfigError(f"unknown words {' '.join(options.words)!r}; usage: rlcore plugins test NAME")
    from tempfile import TemporaryDirectory

    from rlcore.testing.suites import open_suite

    name = options.words[1]
    with (
        TemporaryDirectory(prefix="rlcore-test-") as folder,
        open_suite(name, Path(folder), settings=options.set, plugins=options.plugin) as suite,
    ):
        results = []
        for result in suite.results():
            results.append(result)
            if not options.json:
                CommandLine.show(str(result))
    failed = sum(result.outcome == "FAIL" for result in results)
    if options.json:
        CommandLine.show(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        counts = {word: sum(r.outcome == word for r in results) for word in ("pass", "FAIL", "n/a")}
        seconds = sum(result.seconds for result in results)
        CommandLine.show(
            f"{name}: {', '.join(f'{count} {word}' for word, count in counts.items())}, in {seconds:.0f} s"
        )
    return 1 if failed else 0


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore plugins`."""
    return CommandSpec("plugins", SUMMARIES["plugins"], run=run, options=add_options, config=False)
