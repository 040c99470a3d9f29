"""`rlcore train`: one run, or a sweep of them."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore import CommandSpec, ConfigError, hookimpl
from rlcore.collector import pause_collector
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine

if TYPE_CHECKING:
    from rlcore import Config
    from rlcore.plugins import PluginManager
    from rlcore.training.preflight import Preflight

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--cfg", choices=["job"], help="print the composed config and leave")
    parser.add_argument("-m", "--multirun", action="store_true", help="run each combination of the given values")


def run(line: CommandLine) -> int:
    """Train; 130 for a run that was interrupted."""
    if line.options.multirun and line.options.cfg:
        raise ConfigError("--cfg and --multirun exclude each other; leave one out")
    pause_collector()  # until everything is imported
    if line.options.multirun:
        return _sweep(line)
    _require_plugins(line)
    config = line.compose()
    if line.options.cfg:
        from rlcore.config import to_yaml

        line.show(to_yaml(config).rstrip("\n"))
        return 0
    return _train(config, line.plugins)


def _require_plugins(line: CommandLine) -> None:
    """Check the plugins of a resumed run first: without them its config may not compose."""
    from rlcore.training.folder import require_plugins

    for word in line.overrides:
        if word.startswith("run.dir="):
            require_plugins(Path(word.removeprefix("run.dir=").strip("'\"")).expanduser(), line.plugins)


def _train(config: Config, plugins: PluginManager, checked: Preflight | None = None) -> int:
    if config.cluster.pools == "auto":
        config, checked = plugins.place_roles(config), None
    from rlcore.training.trainer import train

    try:
        return 130 if train(config, plugins, checked=checked)["status"] == "interrupted" else 0
    finally:
        # Let the collector free this run's models before the next job of a sweep makes its own.
        gc.unfreeze()


def _sweep(line: CommandLine) -> int:
    """Compose and check all jobs of a sweep before the first one starts; then run each in a folder of its own."""
    from rlcore.config.compose import sweep
    from rlcore.training.preflight import preflight

    stem = time.strftime("multirun/%Y-%m-%d_%H-%M-%S")
    jobs = sweep(line.overrides)
    flights = []
    for number, job in enumerate(jobs):
        config = line.compose(job)
        folder = dataclasses.replace(config.run, dir=f"{config.run.dir or stem}/{number}")
        flights.append(preflight(dataclasses.replace(config, run=folder), line.plugins))
    for number, (job, checked) in enumerate(zip(jobs, flights, strict=True)):
        print(f"job {number + 1} of {len(jobs)}: {' '.join(job)} -> {checked.config.run.dir}", flush=True)
        if status := _train(checked.config, line.plugins, checked):
            return status
    return 0


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore train`."""
    return CommandSpec("train", SUMMARIES["train"], run=run, options=add_options)
