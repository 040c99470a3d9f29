"""`rlcore samples RUN`: shows a run's samples, their rewards, and the cause of each failed reward."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rlcore import CommandSpec, DataError, hookimpl
from rlcore.commands import SUMMARIES

RLCORE_API = 1


def main(argv: list[str]) -> int:
    """Print a table of one step's samples (the last step by default) of a run folder."""
    parser = argparse.ArgumentParser(prog="rlcore samples", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, help="step to show (default: the last that was written)")
    options = parser.parse_args(argv)
    files = sorted((options.run / "samples").glob("step_*.jsonl"))
    if not files:
        raise DataError(f"{options.run / 'samples'} holds no samples; give the folder of a run that finished a step")
    steps = {int(file.stem.removeprefix("step_")): file for file in files}
    step = max(steps) if options.step is None else options.step
    if step not in steps:
        raise DataError(f"step {step} of {options.run} has no samples; give a step from {min(steps)} to {max(steps)}")
    _show(step, steps[step])
    return 0


def _show(step: int, file: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("uid", "prompt", "response", "answer", "score", "why", title=f"step {step}")
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        detail = row.get("reward_detail") or {}
        why = f"{detail['function']}: {detail['cause']}" if detail else ""
        cells = [row.get("uid"), row.get("prompt_text"), _response(row), row.get("answer"), row.get("scores"), why]
        table.add_row(*map(_plain, cells))
    Console().print(table)


def _response(row: dict[str, Any]) -> str:
    """Return the response's text; of an episode all messages, each with its role."""
    messages = row.get("episode_messages") or []
    if len(messages) < 2:
        return str(row.get("response_text"))
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _plain(value: object) -> str:
    from rich.markup import escape

    return escape(str(value))


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore samples`."""
    return CommandSpec("samples", SUMMARIES["samples"], main)
