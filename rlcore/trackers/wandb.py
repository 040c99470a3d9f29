"""Weights & Biases: scalars, the config, and a table of samples."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from rlcore.config.schema import Config, option
from rlcore.errors import ConfigError
from rlcore.trackers.base import Tracker

_log = logging.getLogger(__name__)

RUN_ID = "wandb_run_id"


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """The wandb run, where `tracker.use` names wandb."""

    project: str = option("rlcore", "wandb project", was="tracker.project", incidental=True)
    entity: str | None = option(None, "wandb entity", was="tracker.entity", incidental=True)
    mode: Literal["online", "offline"] = option("online", "wandb mode", was="tracker.mode", incidental=True)


class WandbTracker(Tracker):
    """Logs to wandb, online or offline (`wandb.mode`); its files are in RUN/wandb.

    RUN/wandb_run_id holds the wandb run's id, so a resumed run continues the same wandb run. The x-axis is the metric
    `step`, so steps that a resumed run repeats are drawn at their old place. wandb itself retries when its server is
    unreachable. Raises ConfigError when wandb is not installed.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"tracker.use names wandb, but it cannot be imported ({error}); pip install wandb, or leave it out"
            ) from error
        self._wandb = wandb
        self._config = config
        self._run_dir = run_dir
        self._run: Any = None

    def start(self, resume_step: int) -> None:
        """Start or resume the wandb run; ConfigError when wandb refuses, for example online without an API key."""
        wandb, config = self._wandb, self._config
        own = config.section(WandbConfig)
        try:
            self._run = wandb.init(
                project=own.project,
                entity=own.entity,
                name=config.run.name or self._run_dir.name,
                id=self._run_id(),
                resume="allow" if own.mode == "online" else None,
                mode=own.mode,
                dir=str(self._run_dir),
                config=dataclasses.asdict(config),
                settings=wandb.Settings(console="off", silent=True),  # the console tracker owns the console
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb failed to start: {error}. Log in with `wandb login`, or set wandb.mode=offline."
            ) from error
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the rows as the table `samples`, with one column per name that occurs in them."""
        if not rows:
            return
        names = list(dict.fromkeys(chain.from_iterable(rows)))
        table = self._wandb.Table(columns=names)
        for row in rows:
            table.add_data(*(_cell(row.get(name)) for name in names))
        self._run.log({"step": step, "samples": table})

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Copy the run's summary to wandb's, and end the wandb run with the run's status."""
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=1 if status == "failed" else 0)

    def _run_id(self) -> str:
        """Return this run folder's wandb id; a start that finds none creates it."""
        path = self._run_dir / RUN_ID
        known = path.read_bytes().strip() if path.exists() else b""
        if re.fullmatch(rb"[\w-]+", known) is None:
            if path.exists():
                _log.warning("%s holds no id of a wandb run; a new one is started", path)
            known = secrets.token_hex(4).encode()
            path.write_bytes(known + b"\n")
        return known.decode()


def _cell(value: Any) -> str | float | bool | None:
    """Return the value as a table cell: mappings and lists become JSON text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return json.dumps(value, default=repr)
