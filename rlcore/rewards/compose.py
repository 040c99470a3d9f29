"""The reward functions of a run, resolved from the reward configuration."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from rlcore.config.schema import RewardConfig
from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins.local import load_name, pickled_by_value
from rlcore.plugins.specs import RewardSpec
from rlcore.rewards.signatures import TrlReward, adapted, needed_columns

_HOW = "Write `def NAME(prompt, response, answer, **columns)` that returns a number."


@dataclass(frozen=True)
class WeightedReward:
    """A reward function ready to be sent to reward processes.

    `data` is the cloudpickled function: by value if it came from a file, else by its module's name. `imports` are
    modules that the process loads before the first call. `needs_answer`: see RewardSpec. `needs_columns`: its
    parameters without a default, besides prompt, response and answer. `extract`: its function that finds a response's
    final answer, cloudpickled as `data` is; None if it has none. A sample's total is the sum of weight times score.
    """

    name: str
    weight: float
    data: bytes
    batched: bool = False
    imports: tuple[str, ...] = ()
    needs_answer: bool = False
    needs_columns: tuple[str, ...] = ()
    extract: bytes | None = None


def needing_answer(rewards: Sequence[WeightedReward]) -> str | None:
    """Return the name of the first reward that needs a reference answer; None if none does."""
    return next((reward.name for reward in rewards if reward.needs_answer), None)


def resolve(
    config: RewardConfig,
    default: str,
    installed: Mapping[str, RewardSpec],
    by_value: Sequence[ModuleType] = (),
    answer_key: str = "answer",
) -> list[WeightedReward]:
    """Return the configured reward functions, at least one.

    `config.path` takes precedence over `config.functions`, and that over `default`, the data set's own reward. The name
    FILE.py:FUNCTION loads FUNCTION from that file under the name STEM.FUNCTION; FUNCTION may also be a RewardSpec, so
    that a file can set `batched=True`. Functions of TRL's and verl's form are called as those call them. `by_value` are
    loaded modules that workers cannot import by name. `answer_key`: the column of the reference answers.

    Raises ConfigError for a name that is not installed, a missing file or function, a signature that does not accept
    (prompt, response, answer), a weight that is not finite, and two rewards of the same name.
    """
    chosen = {config.path: 1.0} if config.path is not None else (config.functions or {default: 1.0})
    rewards: list[WeightedReward] = []
    for reference, weight in chosen.items():
        if not math.isfinite(weight):
            raise ConfigError(f"reward.functions: the weight of {reference!r} is {weight}; a finite number is needed")
        reward = _resolve(reference, float(weight), installed, by_value, answer_key)
        if any(reward.name == other.name for other in rewards):
            raise ConfigError(f"reward.functions: two rewards are called {reward.name!r}; rename a file or a function")
        rewards.append(reward)
    return rewards


def reward_files(config: RewardConfig) -> list[tuple[Path, str]]:
    """Return path and sha256 (hex) of each file named in the configuration as FILE.py:FUNCTION."""
    references = [config.path] if config.path is not None else list(config.functions)
    files = [Path(each.rpartition(":")[0]).expanduser() for each in references if ":" in each]
    return [(file, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def _resolve(
    reference: str,
    weight: float,
    installed: Mapping[str, RewardSpec],
    by_value: Sequence[ModuleType],
    answer_key: str,
) -> WeightedReward:
    path = reference.rpartition(":")[0]
    if path or reference.endswith(".py"):
        spec, module = _from_file(Path(path), reference)
        by_value = [*by_value, module]
    elif reference in installed:
        spec = installed[reference]
    else:
        raise ConfigError(
            f"reward {reference!r} is not installed; installed are {', '.join(sorted(installed)) or 'none'}."
            f"{did_you_mean(reference, installed)} Name your own function as FILE.py:FUNCTION."
        )
    # Pickled here, once: workers never import the file, and a function that cannot be sent fails before Ray starts.
    _check_plain(spec.score, reference)
    if (adapter := adapted(spec.score, reference, answer_key)) is not None:
        spec = replace(spec, score=adapter, batched=isinstance(adapter, TrlReward))
    _check_signature(spec.score, reference)
    extract = spec.extract
    if extract is not None:
        _check_extract(extract, reference)
    try:
        with pickled_by_value(by_value):
            data = cloudpickle.dumps(spec.score)
            extract_data = None if extract is None else cloudpickle.dumps(extract)
    except Exception as error:  # whatever an object that the function uses raises
        raise ConfigError(
            f"reward {reference!r} cannot be sent to its own process: {type(error).__name__}: {error}. Make what it "
            "uses within the function"
        ) from error
    needs = needed_columns(spec.score)
    return WeightedReward(spec.name, weight, data, spec.batched, spec.imports, spec.needs_answer, needs, extract_data)


def _from_file(path: Path, reference: str) -> tuple[RewardSpec, ModuleType]:
    """Load the function (or RewardSpec) that the reference names, as a spec, and its file's module."""

    def accepts(value: object) -> bool:
        return isinstance(value, RewardSpec) or callable(value)

    found, module = load_name(reference, "reward", "function", accepts, _HOW)
    label = f"{path.stem}.{reference.rpartition(':')[2]}"
    if isinstance(found, RewardSpec):
        return replace(found, name=label, on_start=None), module
    return RewardSpec(label, found), module


def _check_plain(score: Callable[..., Any], reference: str) -> None:
    if inspect.iscoroutinefunction(score):
        raise ConfigError(f"reward {reference!r} is an async function; a plain one is needed. {_HOW}")


def _check_signature(score: Callable[..., Any], reference: str) -> None:
    signature = inspect.signature(score)
    try:
        signature.bind_partial("prompt", "response", "answer")
    except TypeError as error:
        raise ConfigError(
            f"reward {reference!r} cannot be called with (prompt, response, answer): its signature is"
            f" {signature} ({error}). {_HOW}"
        ) from None


def _check_extract(extract: Callable[..., Any], reference: str) -> None:
    if not callable(extract):
        raise ConfigError(f"reward {reference!r}: its `extract` is {extract!r}, not a function of a response")
    signature = inspect.signature(extract)
    try:
        signature.bind("response")
    except TypeError as error:
        raise ConfigError(
            f"reward {reference!r}: its `extract` cannot be called with a response alone: its signature is {signature} "
            f"({error}). Write `def NAME(response)` that returns the final answer as text, or None."
        ) from None
