"""Whole runs, in this process or by the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config import compose
from rlcore.plugins import PluginManager


def base(overrides: tuple[str, ...]) -> list[str]:
    """Return what every run here starts from: the quickstart, or nothing where another algorithm is chosen."""
    chosen = any(override.startswith("algo=") for override in overrides)
    return ["tracker=none", *([] if chosen else ["experiment=quickstart"])]


def numbers(run: Path) -> list[dict[str, float]]:
    """Return a run's metrics without those of the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "timeline/", "throughput/"))} for row in rows]


def samples(run: Path) -> list[dict[str, object]]:
    """Return everything that a run wrote to samples/, in order."""
    files = sorted((run / "samples").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Run:
    """A finished (or failed) run: its folder, and what the command printed."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess | None = None) -> None:
        self.folder, self.done = folder, done

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def numbers(self) -> list[dict[str, float]]:
        return numbers(self.folder)

    @property
    def samples(self) -> list[dict[str, object]]:
        return samples(self.folder)


@pytest.fixture(scope="session")
def train_here():
    """Train in this process (with Ray, in the test session's cluster) and return the run."""
    from rlcore.training.trainer import train

    def run(folder: Path, *overrides: str, plugins: PluginManager | None = None) -> Run:
        plugins = plugins or PluginManager.load()
        train(compose([*base(overrides), f"run.dir={folder}", *overrides], plugins), plugins)
        return Run(folder)

    return run


@pytest.fixture(scope="session")
def start_command():
    """Start `rlcore train` as a process of its own; what it prints goes to the file `printed` beside the run."""

    def start(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> subprocess.Popen:
        arguments = [*options, *base(overrides), f"run.dir={folder}", *overrides]
        with open(folder.parent / "printed", "w") as printed:
            return subprocess.Popen(
                [sys.executable, "-m", "rlcore.cli", "train", *arguments],
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=folder.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    return start


@pytest.fixture(scope="session")
def stopping_after():
    """Return the installed plugins, with a hook that raises after a step's checkpoint would be due."""

    class Stopping(PluginManager):
        def step_end(self, run, step_done, metrics):
            super().step_end(run, step_done, metrics)
            if step_done == self.stop_after + 1:
                raise RuntimeError("stop here")

    def load(step: int) -> PluginManager:
        plugins = Stopping.load()
        plugins.stop_after = step
        return plugins

    return load
