"""The evaluations of `eval.sets`: the config of the run as each of them has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from rlcore.config.build import build, defaults, to_plain
from rlcore.config.schema import Config, DataConfig, EvalConfig, RewardConfig
from rlcore.errors import ConfigError, DataError, EpisodesError, RewardsError

OF_A_DATA_SET = (
    *("path", "subset", "train_split", "eval_split", "held_out_share"),
    *("prompt_key", "answer_key", "rendered", "eval_size"),
)
"""Keys of `data` that belong to one data set, so that those of the run do not hold for another."""
WHOLE = {"held_out_share": 1.0, "eval_size": 0}
"""A data set that is not the run's is evaluated on whole: nothing of it is trained on."""
NOT_READ = {
    "data": ("max_rows", "batch_size", "shuffle", "drop_last"),
    "reward": ("model", "model_weight", "workers"),
}
"""Keys that an evaluation does not read, by section."""


def set_config(config: Config, name: str) -> Config:
    """Return the run's config with the values of the evaluation `eval.sets.NAME` in place of its own.

    Its samples are `trainer.eval_samples`, its temperature `trainer.eval_temperature`, its response length
    `rollout.response_len`. Raises ConfigError, with the key below `eval.sets`, for an invalid key or value.
    """
    given, path = config.eval.sets[name], f"eval.sets.{name}"
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(
            f"{path}: the name is part of metrics, as eval/NAME/accuracy; write it with letters, digits, _ and - alone"
        )
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


def _data(config: DataConfig, given: Mapping[str, Any], path: str) -> DataConfig:
    _check_read(given, "data", path)
    values = to_plain(config)
    if any(key in given and given[key] != values[key] for key in ("name", "path")):
        standard = {**defaults(DataConfig), **WHOLE}
        values |= {key: standard[key] for key in OF_A_DATA_SET}
    return build(DataConfig, {**values, **given}, path)


def _reward(config: RewardConfig, given: Mapping[str, Any], path: str) -> RewardConfig:
    _check_read(given, "reward", path)
    values = to_plain(config)
    if "functions" in given or "path" in given:
        values |= {"functions": {}, "path": None}  # one of the two chooses
    return build(RewardConfig, {**values, **given}, path)


def _check_read(given: Mapping[str, Any], section: str, path: str) -> None:
    for key in NOT_READ[section]:
        if key in given:
            raise ConfigError(f"{path}.{key}={given[key]}: evaluations do not read {section}.{key}; leave it out")


@contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Say of errors of the config, the data, the rewards and the episodes that they are those of `eval.sets.NAME`.

    Names of keys become the ones below `eval.sets.NAME`.
    """
    path = f"eval.sets.{name}"
    try:
        yield
    except (ConfigError, DataError, RewardsError, EpisodesError) as error:
        text = _KEYS.sub(lambda found: f"{path}.{_KEYS_OF_SETS[found[0]]}", str(error))
        raise type(error)(text if text.startswith(path) else f"{path}: {text}") from error


_KEYS_OF_SETS = {
    **{f"data.{field.name}": f"data.{field.name}" for field in fields(DataConfig)},
    **{f"reward.{field.name}": f"reward.{field.name}" for field in fields(RewardConfig)},
    "trainer.eval_samples": "samples",
    "trainer.eval_temperature": "temperature",
    "rollout.response_len": "response_len",
}
"""The keys below `eval.sets.NAME` by the run's keys in whose place they are."""
_KEYS = re.compile(rf"(?<![\w./])(?:{'|'.join(map(re.escape, _KEYS_OF_SETS))})\b")
