"""Checkpoints: written under another name, synced to disk, then renamed, so that a partial one is never loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError

_NAME = re.compile(r"step_(\d+)")
_ASIDE = ".writing-"
STATE = "trainer.json"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest step first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name; CheckpointError for any other name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint; a checkpoint's folder is called step_NUMBER")
    return int(match.group(1))


def save(folder: Path, step: int, write: Callable[[Path], dict[str, Any]], keep: int) -> Path:
    """Write checkpoint `step` into `folder` and return its path; then delete all but the newest `keep` (0: keep all).

    `write(path)` writes its files into `path` and returns the trainer's state. Raises CheckpointError when the disk
    refuses; earlier checkpoints stay intact.
    """
    final = folder / f"step_{step:08d}"
    aside = folder / (_ASIDE + final.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Left by runs that were killed while saving.
        for stale in folder.glob(_ASIDE + "*"):
            shutil.rmtree(stale)
        if final.is_dir() and not (final / STATE).is_file():
            shutil.rmtree(final)  # a partial copy, which nothing can load
        aside.mkdir()
        state = write(aside)
        (aside / STATE).write_text(_as_json(state))
        # Contents, then the rename, then the folder's entry: in this order a power cut leaves the old or the new state.
        _sync_tree(aside)
        os.rename(aside, final)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final} cannot be written: {error}") from error
    if keep:
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    return final


def _as_json(state: dict[str, Any]) -> str:
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of the run cannot be written as JSON: {error}; Algorithm.state_dict must return JSON values"
        ) from error


def load(path: Path) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint. Raises CheckpointError when it cannot be read."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} holds a {type(state).__name__}; expected the trainer's state, an object")
    return state


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
