"""Checkpoints: written under another name, synced to disk, then renamed, so that a partial one is never loaded.

A manifest with the size and sha256 of every file is written last; a checkpoint is whole if its files are still those.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d+)")
_ASIDE = ".writing-"
DAMAGED = "damaged-"
STATE, MANIFEST = "trainer.json", "manifest.json"
BEST = "best"
_READERS = 8


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest step first; their files may have changed since."""
    return [path for path in _named(folder) if (path / MANIFEST).is_file()]


def newest_whole(folder: Path, *parts: str) -> Path | None:
    """Return the newest checkpoint in `folder` whose files are those that were written; None for no checkpoint.

    parts: check only the files below these paths, such as "actor/model". A damaged checkpoint is named in a warning.
    Raises CheckpointError, naming the wrong files, when there are checkpoints and none is whole.
    """
    damaged: list[str] = []
    for path in reversed(_named(folder)):
        if not (wrong := faults(path, *parts)):
            for text in damaged:
                log.warning("%s; going on with %s", text, path)
            return path
        if not path.is_dir():
            continue  # a run that goes on has deleted it meanwhile
        damaged.append(f"checkpoint {path} is damaged: {'; '.join(wrong[:5])}")
    if damaged:
        raise CheckpointError(
            f"{'. '.join(damaged)}. No whole checkpoint is left in {folder}: restore the files from a copy, or start "
            f"another run. If you changed a file on purpose, delete its entry from {MANIFEST}"
        )
    return None


def set_aside_after(whole: Path) -> None:
    """Rename the checkpoints of later steps, which are damaged: the run will write these steps again."""
    for path in _named(whole.parent):
        if step_of(path) > step_of(whole):
            shutil.rmtree(whole.parent / (DAMAGED + path.name), ignore_errors=True)
            try:
                os.rename(path, whole.parent / (DAMAGED + path.name))
            except OSError as error:
                raise CheckpointError(f"damaged checkpoint {path} cannot be renamed: {error}; move it away") from error


def faults(path: Path, *parts: str) -> list[str]:
    """Return the faults of a checkpoint's files by its manifest; [] if all are as they were written.

    parts: see newest_whole.
    """
    try:
        expected = _listed(path)
        known = {name: (entry["bytes"], entry["sha256"]) for name, entry in expected.items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing (an older rlcore wrote none)" if path.is_dir() else "it has been deleted"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"]
    names = [name for name in known if any(Path(name).is_relative_to(part) for part in parts or ("",))]
    with ThreadPoolExecutor(_READERS) as readers:
        return [text for text in readers.map(lambda name: _fault(path / name, name, *known[name]), names) if text]


def written_files(path: Path) -> list[str]:
    """Return the files of a checkpoint by its manifest, as paths in it; CheckpointError where it cannot be read."""
    try:
        return list(_listed(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {type(error).__name__}: {error}") from error


def _listed(path: Path) -> dict[str, Any]:
    """Return the files that a checkpoint's manifest lists."""
    return dict(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"])


def _fault(file: Path, name: str, size: int, sha256: str) -> str | None:
    try:
        found = file.stat().st_size
        if found != size:
            return f"{name} has {found} bytes in place of {size}"
        return None if _sha256(file) == sha256 else f"{name} is not what was written (sha256)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    with ThreadPoolExecutor(_READERS) as readers:  # hashlib computes outside of Python's lock
        sums = list(readers.map(_sha256, files))
    entries = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in sorted(zip(files, sums, strict=True))
    }
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")


def _named(folder: Path) -> list[Path]:
    """Return the folders that have a checkpoint's name, oldest step first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name; CheckpointError for any other name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint; a checkpoint's folder is called step_NUMBER")
    return int(match.group(1))


def names_checkpoint(target: Path) -> bool:
    """Whether a path is RUN/checkpoints/NAME, of a checkpoint that exists or not."""
    return target.parent.name == "checkpoints" and (target.name == BEST or _NAME.fullmatch(target.name) is not None)


def split_target(target: Path) -> tuple[Path, Path | None]:
    """Return the run folder and the checkpoint of RUN/checkpoints/NAME; (target, None) for any other path.

    NAME is a checkpoint's, or `best`.
    """
    if target.parent.name == "checkpoints" and (target / MANIFEST).is_file():
        return target.parent.parent, target.resolve()
    return target, None


def chosen_whole(target: Path, *parts: str) -> Path | None:
    """Return the checkpoint that `target` names, or the newest whole one of the run folder `target`, if it has any.

    parts: see newest_whole. Raises CheckpointError when the checkpoint, or all of the run's, are damaged.
    """
    run, chosen = split_target(target)
    if chosen is None:
        return newest_whole(run / "checkpoints", *parts)
    if wrong := faults(chosen, *parts):
        raise CheckpointError(
            f"checkpoint {chosen} is damaged: {'; '.join(wrong[:5])}; restore its files, or give the run {run} for its "
            "newest whole checkpoint"
        )
    return chosen


def link_best(folder: Path, step: int) -> None:
    """Let the link `best` in `folder` name the checkpoint of a step; CheckpointError when the disk refuses."""
    aside = folder / (_ASIDE + BEST)
    try:
        aside.unlink(missing_ok=True)
        aside.symlink_to(path_of(folder, step).name)
        os.replace(aside, folder / BEST)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"{folder / BEST} cannot be written: {error}") from error


def path_of(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in `folder`, whether it exists or not."""
    return folder / f"step_{step:08d}"


def save(folder: Path, step: int, write: Callable[[Path], dict[str, Any]], keep: int, best: int | None = None) -> Path:
    """Write checkpoint `step` into `folder` and return its path; then delete all but the newest `keep` (0: keep all).

    `write(path)` writes its files into `path` and returns the trainer's state. `best`: a step whose checkpoint stays;
    if it is this one, the link `best` names it. Raises CheckpointError when the disk refuses; earlier checkpoints stay
    intact.
    """
    final = path_of(folder, step)
    aside = folder / (_ASIDE + final.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Left by runs that were killed while saving.
        for stale in folder.glob(_ASIDE + "step_*"):
            shutil.rmtree(stale)
        if final.is_dir() and not (final / MANIFEST).is_file():
            shutil.rmtree(final)  # a partial copy, which nothing can load
        aside.mkdir()
        state = write(aside)
        (aside / STATE).write_text(_as_json(state))
        _write_manifest(aside)
        # Contents, then the rename, then the folder's entry: in this order a power cut leaves the old or the new state.
        _sync_tree(aside)
        os.rename(aside, final)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final} cannot be written: {error}") from error
    if step == best:
        link_best(folder, step)  # before the one that was the best is deleted
    if keep:
        for old in checkpoints(folder)[:-keep]:
            if step_of(old) != best:
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
