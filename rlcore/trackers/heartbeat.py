"""RUN/heartbeat.json, for monitoring from outside: the run's host and process, its step, and the time of its last sign.

An ordinary plugin that uses only life-cycle hooks; `-p no:hooks.heartbeat` leaves it out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import hookimpl

if TYPE_CHECKING:
    from rlcore import Run

RLCORE_API = 1
NAME = "heartbeat.json"


def _beat(run: Run, **news: Any) -> None:
    path = run.dir / NAME
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there yet, or damaged: nothing needs what it says
        before = {}
    now = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "step": run.step}
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps({**before, **now, **news}) + "\n")
    os.replace(aside, path)


@hookimpl
def rlcore_run_start(run: Run) -> None:
    """Write the status "running"."""
    _beat(run, status="running")


@hookimpl
def rlcore_step_end(run: Run) -> None:
    """Write the step."""
    _beat(run)


@hookimpl
def rlcore_checkpoint(run: Run, path: Path) -> None:
    """Write the step of the checkpoint that is about to be complete."""
    _beat(run, checkpoint_step=run.step)


@hookimpl
def rlcore_run_end(run: Run, status: str) -> None:
    """Write the run's final status."""
    _beat(run, status=status)
