"""`rlcore plugins test NAME`: run a plugin's conformance suite and print its report card."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlcore import CommandLine, CommandSpec, ConfigError, hookimpl

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rlcore plugins test`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config of the suite's runs")
    parser.add_argument("--script", metavar="FILE.py:NAME", help="script of an environment's episodes: NAME(row, turn)")
    parser.add_argument("words", nargs="*", metavar="NAME", help="the plugin: NAME or GROUP=NAME")


def run(line: CommandLine) -> int:
    """Print a plugin's report card; 1 when a check fails."""
    options = line.options
    if len(options.words) != 1:
        given = f"the words {' '.join(options.words)!r}" if options.words else "no name"
        raise ConfigError(f"rlcore plugins test takes one name and was given {given}; usage: rlcore plugins test NAME")
    from rlcore_plugin_testing.suites import open_suite

    (name,) = options.words
    with (
        TemporaryDirectory(prefix="rlcore-test-") as folder,
        open_suite(
            name, Path(folder), settings=options.set, plugins=options.plugin, script=_script(options.script)
        ) as suite,
    ):
        results = []
        for result in suite.results():
            results.append(result)
            if not options.json:
                line.show(str(result))
    failed = sum(result.outcome == "FAIL" for result in results)
    if options.json:
        line.show(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        counts = {word: sum(r.outcome == word for r in results) for word in ("pass", "FAIL", "n/a")}
        seconds = sum(result.seconds for result in results)
        line.show(f"{name}: {', '.join(f'{count} {word}' for word, count in counts.items())}, in {seconds:.0f} s")
    return 1 if failed else 0


def _script(reference: str | None) -> Callable[..., Any] | None:
    """Load the function FILE.py:NAME."""
    if reference is None:
        return None
    from rlcore.plugins.local import load_name

    script: Callable[..., Any] = load_name(reference, "script", "function", callable, "Write a function.")[0]
    return script


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore plugins test`."""
    summary = "run a plugin's conformance suite: rlcore plugins test NAME"
    return CommandSpec("plugins test", summary, run=run, options=add_options, config=False)
