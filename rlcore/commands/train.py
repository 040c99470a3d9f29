"""`rlcore train`: one run, or a sweep of them."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Sequence
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
    source_help = "a new run from a checkpoint of RUN, with its config; RUN/checkpoints/NAME names one too"
    parser.add_argument("--from", dest="source", metavar="RUN[@STEP]", help=source_help)
    parser.add_argument("--cfg", choices=["job"], help="print the composed config and leave")
    parser.add_argument("-m", "--multirun", action="store_true", help="run each combination of the given values")


def run(line: CommandLine) -> int:
    """Train; 130 for a run that was interrupted."""
    if line.options.multirun and line.options.cfg:
        raise ConfigError("--cfg and --multirun exclude each other; leave one out")
    if line.options.source and line.options.config:
        raise ConfigError("--from takes the config of the run that it names, and --config another; leave one out")
    pause_collector()  # until everything is imported
    if line.options.multirun:
        return _sweep(line)
    _require_plugins(line)
    config = _compose(line, line.overrides, _run_dir(line.overrides))
    if line.options.cfg:
        from rlcore.config import to_yaml

        line.show(to_yaml(config).rstrip("\n"))
        return 0
    return _train(config, line.plugins)


def _require_plugins(line: CommandLine) -> None:
    """Check the plugins of a resumed run first: without them its config may not compose."""
    from rlcore.training.folder import require_plugins

    if (folder := _run_dir(line.overrides)) is not None:
        require_plugins(folder, line.plugins)


def _run_dir(overrides: Sequence[str]) -> Path | None:
    """Return the folder that an override `run.dir=FOLDER` names; None without one."""
    from rlcore.config.compose import parse

    given = [parse(word) for word in overrides if "run.dir=" in word]
    folders = [each.value() for each in given if each.key_or_group == "run.dir"]
    return Path(str(folders[-1])).expanduser() if folders else None


def _compose(line: CommandLine, overrides: Sequence[str], folder: Path | None, source: Path | None = None) -> Config:
    """Return the config of a run in `folder`; that of a fork starts from its own once it has begun, else from RUN's.

    source: the checkpoint in place of the one that `--from` names.
    """
    if line.options.source is None:
        return line.compose(overrides)
    from rlcore.config.files import begun_values, read_values
    from rlcore.training.folder import CONFIG, require_plugins
    from rlcore.training.fork import run_of, target_of

    target = target_of(line.options.source)
    base = begun_values(folder) if folder is not None else {}
    if not base:
        run, target = run_of(target), source or target
        if not (run / CONFIG).is_file():
            raise ConfigError(
                f"--from {line.options.source}: {run} holds no run ({CONFIG}); give RUN, RUN@STEP or "
                "RUN/checkpoints/NAME. A model is trained by model.path=FOLDER"
            )
        require_plugins(run, line.plugins)
        base = read_values(run / CONFIG)
    return line.compose(overrides, base=base).with_values({"run.source": str(target)})


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
    source = None
    for number, job in enumerate(jobs):
        config, source = _compose_job(line, job, number, source)
        folder = dataclasses.replace(config.run, dir=f"{config.run.dir or stem}/{number}")
        flights.append(preflight(dataclasses.replace(config, run=folder), line.plugins))
    for number, (job, checked) in enumerate(zip(jobs, flights, strict=True)):
        print(f"job {number + 1} of {len(jobs)}: {' '.join(job)} -> {checked.config.run.dir}", flush=True)
        if status := _train(checked.config, line.plugins, checked):
            return status
    return 0


def _compose_job(line: CommandLine, job: list[str], number: int, source: Path | None) -> tuple[Config, Path | None]:
    """Return the config of a sweep's job, and the checkpoint from which all its forks start, once one needs it."""
    from rlcore.config.files import begun_values
    from rlcore.training.fork import check_length, choose_source, target_of

    given = _run_dir(job)
    folder = None if given is None else given / str(number)
    if line.options.source is None or (folder is not None and begun_values(folder)):
        return _compose(line, job, folder), source
    source = source or choose_source(target_of(line.options.source))
    config = _compose(line, job, folder, source)
    if config.trainer.epochs is None:
        check_length(config)
    return config, source


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore train`."""
    return CommandSpec("train", SUMMARIES["train"], run=run, options=add_options)
