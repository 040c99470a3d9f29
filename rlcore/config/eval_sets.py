"""The evaluations of `eval.sets` and the sources of `data.mix`: the config of the run as each of them has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from rlcore.config.build import build, defaults, to_plain
from rlcore.config.schema import Config, DataConfig, EvalConfig, RewardConfig
from rlcore.errors import CheckpointError, ConfigError, DataError, EpisodesError, RewardsError

OF_A_DATA_SET = (
    *("path", "subset", "train_split", "eval_split", "held_out_share"),
    *("prompt_key", "answer_key", "rendered", "eval_size"),
)
"""Keys of `data` that belong to one data set, so that those of the run do not hold for another."""
WHOLE = {"held_out_share": 1.0, "eval_size": 0}
"""A data set that is not the run's is evaluated on whole: nothing of it is trained on."""
NOT_READ = {
    "data": ("max_rows", "batch_size", "shuffle", "drop_last", "curriculum", "mix"),
    "reward": ("model", "model_weight", "workers"),
}
"""Keys that an evaluation does not read, by section."""
NOT_OF_A_SOURCE = {**NOT_READ, "data": ("batch_size", "drop_last", "rendered", "mix")}
"""Keys that a source of `data.mix` does not read, by section."""
REPLACED_BY_MIX = (
    *("name", "path", "subset", "train_split", "eval_split", "held_out_share"),
    *("max_rows", "prompt_key", "answer_key"),
)
"""Keys of `data` that name one data set or describe its rows, so that a run with `data.mix` has none of its own."""


def set_config(config: Config, name: str) -> Config:
    """Return the run's config with the values of the evaluation `eval.sets.NAME` in place of its own.

    Its samples are `trainer.eval_samples`, its temperature `trainer.eval_temperature`, its response length
    `rollout.response_len`. Raises ConfigError, with the key below `eval.sets`, for an invalid key or value.
    """
    given, path = config.eval.sets[name], f"eval.sets.{name}"
    _check_name(name, path)
    if config.data.mix and "name" not in given.data:
        raise ConfigError(f"{path}.data has no name; with data.mix the run has no data set of its own, so give one")
    trainer, rollout = config.trainer, config.rollout
    if given.samples is not None:
        trainer = replace(trainer, eval_samples=given.samples)
    if given.temperature is not None:
        trainer = replace(trainer, eval_temperature=given.temperature)
    if given.response_len is not None:
        rollout = replace(rollout, response_len=given.response_len)
    return replace(
        config,
        data=_data(config.data, given.data, f"{path}.data"),
        reward=_reward(config.reward, given.reward, f"{path}.reward"),
        trainer=trainer,
        rollout=rollout,
        eval=EvalConfig(),
    )


def source_config(config: Config, name: str) -> Config:
    """Return the run's config with the values of the source `data.mix.NAME` in place of its own.

    Raises ConfigError, with the key below `data.mix`, for an invalid key or value.
    """
    given, path = config.data.mix[name], f"data.mix.{name}"
    _check_name(name, path)
    if "name" not in given.data:
        raise ConfigError(f"{path}.data has no name; give its data set, as {path}.data.name=file")
    _check_read(given.data, "data", f"{path}.data", NOT_OF_A_SOURCE, "sources of data.mix")
    # A source goes on with its next epoch inside a batch, so that no prompt is left over.
    values = {**to_plain(config.data), "mix": {}, "drop_last": False, **given.data}
    reward = _reward(config.reward, given.reward, f"{path}.reward", "sources of data.mix")
    return replace(config, data=build(DataConfig, values, f"{path}.data"), reward=reward, eval=EvalConfig())


def _check_name(name: str, path: str) -> None:
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(
            f"{path}: the name is part of metrics, as eval/NAME/accuracy; write it with letters, digits, _ and - alone"
        )


def _data(config: DataConfig, given: Mapping[str, Any], path: str) -> DataConfig:
    _check_read(given, "data", path)
    values = {**to_plain(config), "mix": {}}
    # Beside sources of a mix, every evaluation has another data set than the run, which has none.
    if config.mix or any(key in given and given[key] != values[key] for key in ("name", "path")):
        standard = {**defaults(DataConfig), **WHOLE}
        values |= {key: standard[key] for key in OF_A_DATA_SET}
    return build(DataConfig, {**values, **given}, path)


def _reward(config: RewardConfig, given: Mapping[str, Any], path: str, readers: str = "evaluations") -> RewardConfig:
    _check_read(given, "reward", path, readers=readers)
    values = to_plain(config)
    if "functions" in given or "path" in given:
        values |= {"functions": {}, "path": None}  # one of the two chooses
    return build(RewardConfig, {**values, **given}, path)


def _check_read(
    given: Mapping[str, Any],
    section: str,
    path: str,
    not_read: Mapping[str, Sequence[str]] = NOT_READ,
    readers: str = "evaluations",
) -> None:
    for key in not_read[section]:
        if key in given:
            raise ConfigError(f"{path}.{key}={given[key]}: {readers} do not read {section}.{key}; leave it out")


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Say of errors of the config, the data, the rewards and the episodes that they are those of the key `path`.

    path: `eval.sets.NAME` or `data.mix.NAME`; names of keys become the ones below it.
    """
    try:
        yield
    except (CheckpointError, ConfigError, DataError, RewardsError, EpisodesError) as error:
        keys = _SHARED_KEYS if path.startswith("data.mix.") else _KEYS_OF_SETS
        text = _KEYS.sub(lambda found: f"{path}.{keys[found[0]]}" if found[0] in keys else found[0], str(error))
        raise type(error)(text if text.startswith(path) else f"{path}: {text}") from error


_SHARED_KEYS = {
    **{f"data.{field.name}": f"data.{field.name}" for field in fields(DataConfig) if field.name != "mix"},
    **{f"reward.{field.name}": f"reward.{field.name}" for field in fields(RewardConfig)},
}
"""The keys below `data.mix.NAME` by the run's keys in whose place they are."""
_KEYS_OF_SETS = {
    **_SHARED_KEYS,
    "trainer.eval_samples": "samples",
    "trainer.eval_temperature": "temperature",
    "rollout.response_len": "response_len",
}
"""The keys below `eval.sets.NAME` by the run's keys in whose place they are."""
_KEYS = re.compile(rf"(?<![\w./])(?:{'|'.join(map(re.escape, _KEYS_OF_SETS))})\b")
