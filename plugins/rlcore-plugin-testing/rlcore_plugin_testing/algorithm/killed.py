"""A run that kills its own process with SIGKILL at the end of a step, before its checkpoint, as a crash would."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlcore import PluginManager
from rlcore.config import from_yaml
from rlcore.training.trainer import train

IMPORTED = [__name__, "hydra", "tensordict", "transformers.models.auto.modeling_auto"]
"""A run's slow imports: done once, in the process from which the runs' processes are forked."""


class KillingPlugins(PluginManager):
    """Plugins that end the process at the end of a step."""

    at = 0

    def step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Kill the process at the end of step `at`."""
        super().step_end(run, step, metrics)
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def start(step: int, config: str, folder: Path, plugins: Sequence[str], log: Path) -> BaseProcess:
    """Start a run in its own process, which lives until the end of `step`; its output goes to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_run, args=(step, config, folder, list(plugins), log, os.getcwd()))
    process.start()
    return process


def _run(step: int, config_text: str, folder: Path, options: list[str], log: Path, where: str) -> None:
    os.chdir(where)  # the fork server's folder is the one in which it was started
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    plugins = KillingPlugins.load(options)
    plugins.at = step
    config = from_yaml(config_text, plugins)
    train(replace(config, run=replace(config.run, dir=str(folder))), plugins)
