"""The built-in trackers, as a plugin. A tracker's libraries are imported when a run uses it."""

from __future__ import annotations

from pathlib import Path

from rlcore import Config, ConfigSpec, TrackerSpec, hookimpl
from rlcore.trackers.base import Tracker
from rlcore.trackers.jsonl import JsonlTracker
from rlcore.trackers.wandb import WandbConfig, WandbTracker

RLCORE_API = 1


def _console(config: Config, run_dir: Path) -> Tracker:
    from rlcore.trackers.console import ConsoleTracker

    return ConsoleTracker(config, run_dir)


@hookimpl
def rlcore_trackers() -> list[TrackerSpec]:
    """Return the console, the files (which are always on) and wandb."""
    return [
        TrackerSpec("console", _console),
        TrackerSpec("jsonl", JsonlTracker),
        TrackerSpec("wandb", WandbTracker),
    ]


@hookimpl
def rlcore_configs() -> ConfigSpec[WandbConfig]:
    """Register the keys `wandb.*`."""
    return ConfigSpec("wandb", WandbConfig)
