"""rlcore from Python: `rlcore.train` and `rlcore.load_run`, for scripts and notebooks. docs/python.md.

A run is the command line's: its config is composed alike, and the same trainer trains it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlcore.commands.eval import target_values
from rlcore.commands.export import export
from rlcore.commands.serve import with_weights
from rlcore.config import RewardConfig, compose
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import load_tokenizer
from rlcore.data.given import GivenRows, encode_rows
from rlcore.data.loader import PromptSplit
from rlcore.errors import ConfigError
from rlcore.exits import exits_are_errors, work_begins
from rlcore.model_folder import check_positions
from rlcore.plugins import DatasetSpec, PluginManager, RewardSpec, hookimpl
from rlcore.trackers.jsonl import METRICS, SAMPLES, read_lines
from rlcore.training import trainer
from rlcore.training.evaluate import all_metrics, evaluate_target, open_actor
from rlcore.training.folder import CONFIG, SUMMARY, check_own, default_path, require_plugins
from rlcore.training.preflight import preflight
from rlcore.workers.gpus import find_gpus

if TYPE_CHECKING:
    from pandas import DataFrame

Rows: TypeAlias = Iterable[Mapping[str, Any]]
"""Rows of a data set: a list of dicts, or a `datasets.Dataset`."""


def train(
    *,
    algo: str | None = None,
    model: str | Path | None = None,
    data: str | Path | Rows | None = None,
    eval_data: Rows | None = None,
    reward: Any = None,
    run_dir: str | Path | None = None,
    callbacks: Sequence[object] = (),
    plugins: Sequence[str] = (),
    **overrides: Any,
) -> RunResult:
    """Train as `rlcore train` does, or resume the unfinished run in the same folder, and return the run.

    algo: an algorithm's name. model: a folder, a name on the hub, or "tiny".
    data: the name of a data set, a file, a folder, a name on the hub, or rows. Rows are written into the run folder.
    eval_data: held-out rows beside rows as `data`; without them a share of these is held out (`data.held_out_share`).
    reward: a function, a RewardSpec or a name, a list of them, or a dict with the weight of each. A function is sent by
    value to the processes that call it; its name in the run is python.NAME.
    run_dir: the run folder; by default runs/ALGO-TIME.
    callbacks: objects whose methods are hooks, marked with `@rlcore.hookimpl`.
    plugins: the values of the command line's option `-p`.
    overrides: keys of the config with Python values, as `**{"rollout.response_len": 64}`, and groups with an option, as
    `cluster="in_process"`.

    A first interrupt finishes the step and writes a checkpoint; the run is returned with the status "interrupted", and
    the same call goes on with it. A second one raises KeyboardInterrupt. Raises the errors of rlcore.errors.
    """
    weights, rewards = _rewards(reward)
    objects = {**rewards, **_callbacks(callbacks)}
    with exits_are_errors():
        manager = PluginManager.load(plugins, objects=objects)
        if run_dir is not None:
            require_plugins(Path(run_dir).expanduser(), manager)
        chosen, rows = _data(data, eval_data, manager)
        given = {"algo": algo, "model.path": model, "run.dir": run_dir, "reward.functions": weights, **chosen}
        config = compose([], manager, values=_merged(given, overrides), find_gpus=find_gpus)
        if config.cluster.pools == "auto":
            config = manager.place_roles(config)
        folder = default_path(config)
        config = replace(config, run=replace(config.run, dir=str(folder)))
        if rows is not None:
            config = replace(config, data=replace(config.data, path=str(rows.path(folder))))
        checked = preflight(config, manager)
        if rows is not None:
            check_own(folder)
            rows.write(folder)
        trainer.train(config, manager, checked=checked)
    return RunResult(folder, plugins, objects)


def load_run(folder: str | Path, *, callbacks: Sequence[object] = (), plugins: Sequence[str] = ()) -> RunResult:
    """Return the run in a folder, also one of the command line. Raises ConfigError for a folder without a run.

    callbacks, plugins: as in `train`, for a run that needs an object's algorithm or local files.
    """
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is no run folder: it has no {CONFIG}")
    return RunResult(path, plugins, _callbacks(callbacks))


class RunResult:
    """A run: what it has written to its folder, and what can be done with its newest checkpoint."""

    def __init__(self, folder: Path, plugins: Sequence[str] = (), objects: Mapping[str, object] | None = None) -> None:
        """`objects`: the plugins of the run that were given in Python, by name."""
        self.folder = folder
        self._plugins, self._objects = plugins, dict(objects or {})

    def __repr__(self) -> str:
        summary = self.summary
        return f"RunResult({self.folder}, {summary.get('status', 'not ended')}, {summary.get('steps', 0)} steps)"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; {} for a run that has not ended."""
        path = self.folder / SUMMARY
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    @property
    def metrics(self) -> DataFrame:
        """The metrics: a row for each step, with the column `step`. NaN where a step has no such metric."""
        from pandas import DataFrame

        rows = read_lines(self.folder / METRICS)
        return DataFrame(
            [{name: float(value) if name != "step" else value for name, value in row.items()} for row in rows]
        )

    @property
    def samples(self) -> DataFrame:
        """The samples that the steps have written, a row for each, with the column `step`."""
        from pandas import DataFrame

        files = sorted((self.folder / SAMPLES).glob("step_*.jsonl"))
        return DataFrame(
            [{"step": int(file.stem.removeprefix("step_")), **row} for file in files for row in _read(file)]
        )

    def evaluate(
        self, data: str | Path | Rows | None = None, *, reward: Any = None, **overrides: Any
    ) -> dict[str, float]:
        """Evaluate the newest checkpoint as `rlcore eval` does, and return the metrics by name.

        data, reward: in place of the run's own, as in `train`; all given rows are evaluated on. overrides: as in
        `train`. Raises PluginError for a run whose reward was given in Python and is not given again.
        """
        weights, rewards = _rewards(reward)
        base = target_values(str(self.folder))
        with exits_are_errors():
            manager = PluginManager.load(self._plugins, objects={**self._objects, **rewards})
            given: dict[str, Any] = {"reward.functions": weights}
            if reward is None:
                require_plugins(self.folder, manager)
            else:
                base["reward"] |= {"functions": {}, "path": None}
            if data is not None:
                base["data"] |= {"path": None, "subset": None, "train_split": None, "eval_split": None, "mix": {}}
                base.pop("eval")
                chosen, rows = _data(data, None, manager, split="test")
                given |= chosen
                if rows is not None:
                    rows.write(self.folder)
                    given |= {"data.path": rows.path(self.folder), "data.eval_size": 0}
            config = compose([], manager, base=base, values=_merged(given, overrides), find_gpus=find_gpus)
            preflight(config, manager, "evaluate")
            return all_metrics(evaluate_target(self.folder, config, manager))

    def generate(self, prompts: Sequence[str | list[dict[str, Any]]], **sampling: Any) -> list[str]:
        """Return a response of the newest checkpoint to each prompt, sampled in this process.

        prompts: texts or lists of chat messages, rendered as those of the run were. sampling: keys of `rollout`, as
        temperature=0.0 or response_len=64; the others are the run's. An environment of the run plays nothing.
        """
        base = target_values(str(self.folder))
        base.pop("eval")
        values = {"cluster": "in_process", **{f"rollout.{name}": value for name, value in sampling.items()}}
        rows = [{"prompt": prompt} for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        with exits_are_errors():
            manager = PluginManager.load(self._plugins, objects=self._objects)
            config = with_weights(compose([], manager, base=base, values=values, find_gpus=find_gpus), self.folder)
            rendered = ["prompt"] if config.data.prompt_key in config.data.rendered else []
            data = replace(config.data, prompt_key="prompt", rendered=rendered, mix={}, overlong="error")
            config = replace(config, algorithm="", data=data, reward=RewardConfig())
            if "env" in config.sections:
                config = replace(config, sections={**config.sections, "env": EnvConfig()})
            preflight(config, manager, "evaluate")
            dataset: DatasetSpec = DatasetSpec("prompts", lambda settings, split: rows, reward="")
            split = PromptSplit(data, dataset, load_tokenizer(config.model), "eval")
            check_positions(config, split.longest)
            with open_actor(config, self.folder.resolve(), manager) as run:
                work_begins()
                return list(run.actor.generate(split.batch(split.usable, "eval"))["response_text"])

    def export(
        self,
        folder: str | Path,
        *,
        role: str = "actor",
        merge: bool = False,
        dtype: Literal["fp32", "bf16"] | None = None,
    ) -> Path:
        """Write the model of the newest checkpoint, or its adapter, to a new folder, as `rlcore export` does.

        merge: merge the adapter into its model. dtype: the model's precision (default: as it is saved).
        """
        path = Path(folder).expanduser()
        export(self.folder, path, role=role, merge=merge, dtype=dtype)
        return path


class _RewardPlugin:
    """The plugin of a reward function that is given in Python."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec

    @hookimpl
    def rlcore_rewards(self) -> RewardSpec:
        return self._spec


def _rewards(reward: Any) -> tuple[dict[str, float] | None, dict[str, object]]:
    """Return the weights of the rewards by name, None without any, and the plugins of those that are functions."""
    if reward is None:
        return None, {}
    several = list(reward) if isinstance(reward, (list, tuple)) else [reward]
    weighted = list(reward.items()) if isinstance(reward, Mapping) else [(each, 1.0) for each in several]
    weights: dict[str, float] = {}
    plugins: dict[str, object] = {}
    for each, weight in weighted:
        name = each
        if not isinstance(each, str):
            if not isinstance(each, RewardSpec) and not callable(each):
                raise ConfigError(f"reward: {each!r} is neither a function nor the name of a reward")
            spec = each if isinstance(each, RewardSpec) else RewardSpec(_name(each), each)
            name = f"python.{spec.name}"
            plugins[name] = _RewardPlugin(replace(spec, name=name))
        if name in weights:
            raise ConfigError(f"reward: two rewards are called {name!r}; rename a function")
        weights[name] = weight
    return weights, plugins


def _name(function: Any) -> str:
    return re.sub(r"\W+", "", getattr(function, "__name__", type(function).__name__), flags=re.ASCII)


def _callbacks(callbacks: Sequence[object]) -> dict[str, object]:
    """Return the objects by the names of their classes."""
    named: dict[str, object] = {}
    for each in callbacks:
        if isinstance(each, type):
            raise ConfigError(f"callbacks: {each.__name__} is a class; give an object of it, {each.__name__}()")
        name = type(each).__name__
        alike = sum(type(other) is type(each) for other in named.values())
        named[f"{name}-{alike + 1}" if alike else name] = each
    return named


def _data(
    data: str | Path | Rows | None, eval_data: Rows | None, plugins: PluginManager, split: str = "train"
) -> tuple[dict[str, Any], GivenRows | None]:
    """Return the values that choose the data, and given rows; split: what these rows are."""
    if data is None or isinstance(data, (str, Path)):
        if eval_data is not None:
            raise ConfigError(
                "eval_data goes with rows as `data`; of other data, data.eval_split names the held-out part"
            )
        if data is None:
            return {}, None
        name = str(data)
        is_path = isinstance(data, Path) or "/" in name or "." in name or Path(name).exists()
        if is_path and name not in plugins.datasets():
            return {"data": "file", "data.path": name}, None
        return {"data": name}, None
    splits = {split: encode_rows(data, "data")}
    if eval_data is not None:
        splits["test"] = encode_rows(eval_data, "eval_data")
    return {"data": "file"}, GivenRows(splits)


def _merged(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the arguments that were given, and the overrides. A key given twice is a ConfigError."""
    values = {key: value for key, value in given.items() if value is not None}
    if twice := values.keys() & overrides.keys():
        raise ConfigError(f"{', '.join(sorted(twice))}: given twice, as an argument and by its key; leave out one")
    return {**values, **overrides}


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON Lines; [] without one. A last line that is being written is left out."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]
