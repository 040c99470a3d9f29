"""Forks: new runs from a checkpoint of another run, `run.source`, with anything but the algorithm changed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config, from_yaml, same_run
from rlcore.config.files import CONFIG, begun_values, read_values
from rlcore.errors import CheckpointError, ConfigError
from rlcore.training.checkpoint import (
    BEST,
    STATE,
    checkpoints,
    chosen_whole,
    load,
    names_checkpoint,
    path_of,
    step_of,
    written_files,
)

if TYPE_CHECKING:
    from rlcore.data.loader import PromptLoader
    from rlcore.data.mix import MixLoader
    from rlcore.plugins import PluginManager, Role

CHECKPOINTS = "checkpoints"


def target_of(word: str) -> Path:
    """Return the absolute path that RUN, RUN@STEP or RUN/checkpoints/NAME means: of a run or of a checkpoint."""
    run, _, step = word.rpartition("@")
    path = Path(word).expanduser()
    if run and step.isdecimal() and not path.exists():
        path = path_of(Path(run).expanduser() / CHECKPOINTS, int(step))
    # Not resolved: `best` stays the name that was given.
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


def run_of(target: Path) -> Path:
    """Return the run folder of a run or of a checkpoint, whether it exists or not."""
    return target.parent.parent if names_checkpoint(target) else target


def source_step(config: Config) -> int:
    """Return the step of the checkpoint from which a run forks; 0 for any other run."""
    return 0 if config.run.source is None else step_of(Path(config.run.source))


def choose_source(target: Path, *parts: str) -> Path:
    """Return the absolute path of the checkpoint that `target` names, or of the newest whole one of the run `target`.

    parts: see newest_whole. Raises CheckpointError where there is none or where it is damaged.
    """
    found = chosen_whole(target, *parts)
    if found is None:
        run = run_of(target)
        steps = ", ".join(str(step_of(path)) for path in checkpoints(run / CHECKPOINTS))
        raise CheckpointError(
            f"run.source={target} is no checkpoint, so no run can start from it; {run} has those of the steps "
            f"{steps or '(none)'}. Give RUN, RUN@STEP or RUN/checkpoints/NAME, or none to train from the model"
        )
    return found.resolve()


def with_source(config: Config, path: Path, roles: Mapping[str, Role]) -> Config:
    """Return the config of a run in the folder `path` with `run.source` as the checkpoint from which it forks.

    A run that has begun keeps its source, which it needs no longer once it has a checkpoint of its own. Of the source
    only the files that these roles load are verified. Raises ConfigError for another source than that of the run, and
    for one of another algorithm; CheckpointError where the source is needed and is not whole.
    """
    source = config.run.source
    if saved := begun_values(path):
        begun = saved.get("run", {}).get("source")
        if source is not None and (begun is None or not _is_same(target_of(source), Path(begun))):
            raise ConfigError(
                f"run.dir={path} holds a run that started from {begun or 'its model'}, not from {source}; leave out "
                "--from and give its own config (--config), or give another folder"
            )
        source = begun
        if checkpoints(path / CHECKPOINTS):
            return config.with_values({"run.source": source})
    if source is None:
        return config
    loaded = [name for name, role in roles.items() if role.trains or role.follows]
    found = choose_source(target_of(source), STATE, *loaded)
    if (before := read_values(run_of(found) / CONFIG).get("algorithm")) != config.algorithm:
        raise ConfigError(
            f"run.source={found} is a checkpoint of algo={before}, whose optimizers and state are nothing to another "
            f"algorithm; begin algo={config.algorithm} with its model: model.path={found / 'actor' / 'model'}"
        )
    return config.with_values({"run.source": str(found)})


def _is_same(target: Path, source: Path) -> bool:
    """Whether a target may have meant a source: a run, or its best checkpoint, means a later one when it goes on."""
    if target.name == BEST or not names_checkpoint(target):
        return run_of(target).resolve() == run_of(source)
    return target.resolve() == source


def check_length(config: Config) -> None:
    """Raise ConfigError for a fork without a step."""
    step, total = source_step(config), config.trainer.total_steps
    if config.run.source is not None and total <= step:
        raise ConfigError(
            f"{config.run.source} is of step {step}, and trainer.total_steps = {total}, which counts from the start of "
            f"the run that is forked; give at least {step + 1}"
        )


class Source:
    """The checkpoint from which a run forks, and what of it holds for a run with this config."""

    def __init__(self, path: Path, config: Config, plugins: PluginManager) -> None:
        """Raise CheckpointError where the checkpoint cannot be read, ConfigError where its run's config cannot."""
        self.path, self.step = path, step_of(path)
        self._config = config
        file = run_of(path) / CONFIG
        try:
            self._saved = from_yaml(file.read_text(encoding="utf-8"), plugins)
        except OSError as error:
            raise CheckpointError(f"{file}, the config of run.source, cannot be read: {error}") from error
        state = load(path)
        self._roles = {Path(name).parts[0] for name in written_files(path)}
        try:
            self._loaders = state["loaders"]
            self.algorithm_state: dict[str, Any] = state["algorithm"]["state"]
            self.random_state: dict[str, Any] = state["random"]
            self.fingerprints: dict[str, dict[str, int]] = state["fingerprints"]
        except KeyError as error:
            raise CheckpointError(
                f"{path / STATE} lacks {error}; another version of rlcore wrote it, so fork it with that one"
            ) from error

    @cached_property
    def has_same_algorithm(self) -> bool:
        """Whether the algorithm's settings are the same: with others its state would hide them."""
        return bool(self._saved.algo == self._config.algo)

    @cached_property
    def has_same_seed(self) -> bool:
        """Whether the noise is the same, by name and from the global random generators."""
        return self._saved.trainer.seed == self._config.trainer.seed

    @property
    def lines(self) -> list[str]:
        """The lines that say where the run starts, and in which keys it differs."""
        changed = same_run(self._saved, self._config)
        lines = [f"from {run_of(self.path)} at step {self.step}; other keys: {', '.join(changed) or 'none'}"]
        if self.algorithm_state and not self.has_same_algorithm:
            lines.append("the algorithm's state begins anew, as its settings (algo) differ from the checkpoint's")
        return lines

    def place(self, name: str, loader: PromptLoader | MixLoader) -> list[str]:
        """Move a loader to its position in the checkpoint; return a line where its prompts differ and it stays."""
        state = self._loaders.get(name)
        difference = "the checkpoint has no such data" if state is None else loader.difference(state)
        if difference:
            return [f"data {name}: begins at its first prompt, as {difference}"]
        loader.load_state_dict(state)
        return []

    def role(self, name: str) -> Path | None:
        """Return the folder of a role's state; None for a role that the checkpoint lacks.

        Raises CheckpointError for one that it had, and that has been deleted meanwhile.
        """
        folder = self.path / name
        if name not in self._roles:
            return None
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}, from which role {name!r} starts, has been deleted meanwhile, as by a run that goes on; "
                "keep more checkpoints there (trainer.keep_checkpoints), or copy the one to fork"
            )
        return folder
