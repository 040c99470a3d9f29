"""The run folder: created, or resumed if its run has steps left and its config is equal, or else refused."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rlcore.config import Config, from_yaml, same_run, to_yaml
from rlcore.config.files import CONFIG as CONFIG
from rlcore.config.files import has_begun, run_dir_word
from rlcore.data.given import ROWS
from rlcore.errors import CheckpointError, ConfigError, PluginError
from rlcore.plugins import PluginManager
from rlcore.training.checkpoint import checkpoints, newest_whole, set_aside_after, step_of
from rlcore.training.fork import source_step
from rlcore.training.length import check_goes_on, length_lines

log = logging.getLogger(__name__)

SUMMARY, VERSIONS, LOG = "summary.json", "versions.json", "rlcore.log"
MICRO_BATCHES = "micro_batches.json"
WRITING = ".writing"


class RunFolder:
    """An open, locked run folder; `resume_from` is the checkpoint of `choose_checkpoint`.

    saved: the config of the run that goes on; None for a new one. lines: how its length has changed, by `check_length`.
    """

    def __init__(self, path: Path, lock: IO[str], saved: Config | None = None) -> None:
        self.path, self.saved = path, saved
        self.resume_from: Path | None = None
        self.lines: list[str] = []
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def choose_checkpoint(self) -> None:
        """Set `resume_from` to the newest whole checkpoint; None stays for a run from its start.

        Damaged ones of later steps are named in a warning and renamed. Raises CheckpointError when none is whole.
        """
        if whole := newest_whole(self.checkpoints):
            set_aside_after(whole)
            self.resume_from = whole

    def check_length(self, config: Config) -> None:
        """Raise ConfigError where no step is left after `resume_from`, and set `lines`."""
        if self.saved is None:
            return
        before, after = self.saved.trainer, config.trainer
        step = source_step(config) if self.resume_from is None else step_of(self.resume_from)
        # An equal length is that of a run which was killed after its last checkpoint.
        if after.total_steps < step or (after.total_steps == step and before.total_steps != step):
            given, more = f"trainer.total_steps = {after.total_steps}", f"at least {step + 1}"
            if after.epochs is not None:
                given, more = f"trainer.epochs = {after.epochs}, which are {after.total_steps} steps", "more of them"
            raise ConfigError(
                f"run.dir={self.path} holds a run that has reached step {step}, and {given}; give {more}, or another "
                "folder"
            )
        self.lines = length_lines(self.saved, config, step)

    def go_on(self, config: Config) -> None:
        """Let config.yaml hold the config with which a run goes on from `resume_from`, and remove its summary.

        Later resumes keep it so, and an interrupted one does not look finished. Called once the state is restored: a
        start that fails before leaves the folder as it was. Raises ConfigError when the disk refuses.
        """
        if self.saved is None:
            return
        try:
            _write_whole(self.path / CONFIG, to_yaml(config))
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically; CheckpointError when the disk refuses."""
        self._write(SUMMARY, summary)

    def read_micro_batches(self) -> dict[str, dict[str, Any]]:
        """Return the measured micro-batch of each role; {} before a measurement. CheckpointError for a damaged file."""
        path = self.path / MICRO_BATCHES
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; remove it to measure again") from error

    def write_micro_batches(self, measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the measured micro-batch of each role for a resume; CheckpointError when the disk refuses."""
        self._write(MICRO_BATCHES, measured)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        try:
            _write_whole(self.path / name, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be written: {error}") from error

    def close(self) -> None:
        """Release the folder's lock."""
        self._lock.close()


def default_path(config: Config) -> Path:
    """Return `run.dir`, or runs/ALGO-TIME when it is not set."""
    if config.run.dir is not None:
        return Path(config.run.dir).expanduser()
    return Path("runs") / f"{config.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"


def open_folder(path: Path, config: Config, plugins: PluginManager) -> RunFolder:
    """Create the folder with config.yaml and versions.json, or prepare to resume the run in it.

    A run that was stopped before its first step or evaluation starts anew. A finished run goes on when the config gives
    it further steps.

    Raises ConfigError when the folder cannot be created or written, when another process is using it, when it holds a
    run without a step left or files other than a run's, or when its config differs (naming the keys).
    """
    existing, saved = path / CONFIG, None
    try:
        check_own(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            if existing.exists() and has_begun(path):
                saved = _check_resumable(path, config, plugins)
            else:
                (path / MICRO_BATCHES).unlink(missing_ok=True)  # of a run that never began
                _write_whole(path / VERSIONS, json.dumps(versions(config, plugins), indent=2) + "\n")
                _write_whole(existing, to_yaml(config))
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise _not_written(path, error) from error
    return RunFolder(path, lock, saved)


def _not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be written: {error.strerror or error}; free disk space, allow writing, "
        "or set run.dir"
    )


def check_own(path: Path) -> None:
    """Raise ConfigError when a folder holds files and no run."""
    if path.is_dir() and not (path / CONFIG).exists() and any(not _is_ours(file) for file in path.iterdir()):
        raise ConfigError(f"run.dir={path} holds files but no run ({CONFIG}); give an empty or a new folder")


def _is_ours(file: Path) -> bool:
    """Whether a file may be left over from a run that was stopped while creating its folder."""
    return file.name in (".lock", VERSIONS, ROWS) or file.name.endswith(WRITING)


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it exists whole or not at all."""
    # Synced before the rename: after a power cut the name would otherwise show an empty file.
    aside = path.with_name(path.name + WRITING)
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _lock(path: Path) -> IO[str]:
    lock = open(path / ".lock", "w")  # noqa: SIM115 (held as long as the run lasts)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"run.dir={path} is in use by another rlcore process; wait for it, or give another folder"
        ) from None
    return lock


def _check_resumable(path: Path, config: Config, plugins: PluginManager) -> Config:
    """Return the saved config of the run, which this one may go on; ConfigError, with a remedy, if it may not."""
    saved = from_yaml((path / CONFIG).read_text(encoding="utf-8"), plugins)
    differing, best = same_run(saved, config), config.trainer.best
    if (best in saved.trainer.lower_is_better) != (best in config.trainer.lower_is_better):
        differing.append("trainer.lower_is_better")  # of `stop_at` alone it may change
    if differing:
        own = f"rlcore train --config {shlex.quote(str(path / CONFIG))} {run_dir_word(path)}"
        raise ConfigError(
            f"run.dir={path} holds a run with another config; differing: {', '.join(differing[:10])}. "
            f"Resume it with its own config ({own}), or give another folder"
        )
    summary = path / SUMMARY
    if summary.exists():
        try:
            content = json.loads(summary.read_text(encoding="utf-8"))
            is_finished = content["status"] == "finished"
        except (ValueError, LookupError, TypeError) as error:
            log.warning(
                "%s cannot be read (%s); the run goes on from its checkpoint and writes it again", summary, error
            )
            is_finished = False
        if is_finished:
            check_goes_on(path, content, config)
            if not checkpoints(path / "checkpoints"):
                raise ConfigError(
                    f"run.dir={path} holds a finished run without a checkpoint, so it cannot go on; restore one from a "
                    "copy, or give another folder"
                )
    return saved


def require_plugins(path: Path, plugins: PluginManager) -> None:
    """Raise PluginError, naming the package to install, when a plugin that the folder's run needs is missing.

    Of a damaged versions.json only a warning says that the plugins were not checked.
    """
    try:
        needed = json.loads((path / VERSIONS).read_text(encoding="utf-8"))["plugins"]
    except FileNotFoundError:
        return  # no run has begun here
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): the run's plugins are not checked", path / VERSIONS, error)
        return
    there = {plugin.name: plugin.state for plugin in plugins.list()}
    for plugin in needed:
        name, state = plugin["name"], there.get(plugin["name"])
        if state == "loaded":
            continue
        if state == "blocked":
            remedy = f"which -p no:{name} blocks; remove that option"
        elif plugin["distribution"] is None and plugin["file"] is None:
            remedy = (
                "which was given in Python: give it again, with rlcore.train(..., run_dir=...) to go on, or with "
                "rlcore.load_run(...).evaluate(reward=...)"
            )
        elif plugin["distribution"] is None:
            remedy = f"a local file; give it again with -p {plugin['file']}"
        else:
            wanted = f"{plugin['distribution']}=={plugin['version']}"
            remedy = f"which is no longer installed: pip install {wanted}"
        raise PluginError(f"the run {path} was made with the plugin {name!r}, {remedy}")


def read_versions(path: Path) -> dict[str, Any]:
    """Return the content of a run folder's versions.json; CheckpointError where it cannot be read."""
    try:
        found = json.loads((path / VERSIONS).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / VERSIONS} cannot be read: {error}; restore it from a copy") from error
    return found


def versions(config: Config, plugins: PluginManager) -> dict[str, Any]:
    """Return the versions behind a run: Python, the platform, argv, the main distributions, and its plugins."""
    names = (
        "rlcore",
        "torch",
        "transformers",
        "ray",
        "tensordict",
        "safetensors",
        "numpy",
        "hydra-core",
        "wandb",
        "vllm",
    )
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    foreign = [plugin for plugin in plugins.used_by(config) if plugin.distribution != "rlcore"]
    used = [{"name": p.name, "distribution": p.distribution, "version": p.version, "file": p.file} for p in foreign]
    started = {"python": sys.version.split()[0], "platform": platform.platform(), "argv": sys.argv}
    return {**started, **found, "plugins": used}
