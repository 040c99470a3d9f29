"""Turns plain nested values into the frozen dataclasses, and checks every key, type and range."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlcore.config.installed import Installed
from rlcore.config.schema import NO_KEYS, REMOVED, SECTIONS, Config
from rlcore.errors import ConfigError, did_you_mean

T = TypeVar("T")

REQUIRED = "???"
"""Marks a required value, as in hydra."""

OTHER_NAMES = {
    "actor_learning_rate": "engine.lr",
    "beta": "kl_coef",
    "clip_ratio": "clip_low clip_high",
    "clip_ratio_c": "dual_clip",
    "clip_ratio_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "cliprange": "clip_low clip_high",
    "cliprange_value": "value_clip",
    "critic_learning_rate": "critic_lr",
    "critic_pretrain": "critic_model",
    "entropy_coeff": "entropy_coef",
    "entropy_loss_coef": "entropy_coef",
    "epsilon": "clip_low clip_high",
    "epsilon_high": "clip_high",
    "eps_clip": "clip_low clip_high",
    "gae_lambda": "lam",
    "generate_max_len": "rollout.response_len",
    "horizon": "kl_gain",
    "init_kl_coef": "kl_coef",
    "kl_ctrl": "kl_controller",
    "kl_horizon": "kl_gain",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "kl_penalty": "kl_estimator kl_coef",
    "lambd": "lam",
    "learning_rate": "engine.lr",
    "max_completion_length": "rollout.response_len",
    "max_new_tokens": "rollout.response_len",
    "max_prompt_length": "data.prompt_len",
    "max_response_length": "rollout.response_len",
    "max_steps": "trainer.total_steps",
    "model_name_or_path": "model.path",
    "n_samples_per_prompt": "group_size samples",
    "num_generations": "group_size samples",
    "num_mini_batches": "mini_batches",
    "num_ppo_epochs": "algo.epochs",
    "output_dir": "run.dir",
    "num_train_epochs": "trainer.epochs",
    "ppo_epochs": "algo.epochs",
    "prompt_max_len": "data.prompt_len",
    "total_epochs": "trainer.epochs",
    "total_training_steps": "trainer.total_steps",
    "train_batch_size": "data.batch_size",
    "use_kl_in_reward": "kl_in",
    "use_kl_loss": "kl_in",
}
"""The key, or the two keys, that are meant by names of TRL, verl and OpenRLHF, for messages."""
MOST_HINTS = 3
_SCALARS = (bool, int, float, str, types.NoneType)


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the frozen dataclass `cls` from plain values; a missing key takes the field's default.

    `path` is the dotted key of the whole, for messages. Raises ConfigError for an unknown or missing key, a wrong type,
    or a number out of bounds; the message has the key, the value, the allowed ones and the nearest name.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'the config'} = {values!r} must be a mapping of keys to values")
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(_unknown(str(key), list(fields), path))
    built = {}
    for name, field in fields.items():
        key = _join(path, name)
        if name in values and values[name] != REQUIRED:
            value = _convert(values[name], hints[name], key)
            _check_bounds(value, field.metadata, key)
            built[name] = value
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            doc = field.metadata.get("doc", "")
            raise ConfigError(f"{key} must be given ({type_name(hints[name])}{': ' + doc if doc else ''}): {key}=VALUE")
    return cls(**built)


def build_config(values: Mapping[str, Any], algorithm_config: type | None, plugins: Installed) -> Config:
    """Build a whole Config.

    algorithm_config: the class of `algo`, None for a config without an algorithm.
    plugins: their config classes are the sections (`judge`, `rollout.NAME`). All values of sections are checked; the
    Config keeps the section of an engine only if a role uses the engine.
    """
    sections = plugins.sections()
    _check_moved(values, sections)
    _check_keys(values, {**SECTIONS, **({"algo": algorithm_config} if algorithm_config else {}), **sections})
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    inner = [path for path in sections if "." in path]
    taken = {path: _taken(plain, path) for path in [*inner, *sections.keys() - inner]}
    own: dict[str, Any] = {path: build(cls, taken[path], path) for path, cls in sections.items()}
    algo = plain.pop("algo", None) or {}
    if algorithm_config is None and algo:
        raise ConfigError(f"algo.{next(iter(algo))} needs an algorithm; choose one with algo=NAME")
    config = build(Config, {**plain, "algo": algorithm_config and build(algorithm_config, algo, "algo")})
    used = plugins.used_sections(dataclasses.replace(config, sections=own))
    unused: dict[str, Any] = {}
    for path in own.keys() - used:
        standard = defaults(type(own[path]))
        given = to_plain(own[path]).items()
        unused |= {f"{path}.{key}": value for key, value in given if value != standard[key]}
    kept = {path: section for path, section in own.items() if path in used}
    return dataclasses.replace(config, sections=kept, unused=unused)


def _check_keys(values: Mapping[str, Any], sections: Mapping[str, type]) -> None:
    """Raise ConfigError for a key at the top or in a section that neither the core nor a plugin has.

    sections: the dataclasses of all sections by dotted name, the core's included. The message names the key of another
    section that was meant.
    """
    core = [field.name for field in dataclasses.fields(Config) if field.name not in NO_KEYS]
    allowed = {"": list(dict.fromkeys([*core, *(path.partition(".")[0] for path in sections)]))}
    allowed |= {path: [field.name for field in dataclasses.fields(cls)] for path, cls in sections.items()}
    keys = [_join(path, name) for path, names in allowed.items() if path for name in names]
    for top, _, name in (path.partition(".") for path in sections):
        if name:
            allowed[top].append(name)
    for path, names in allowed.items():
        for key in _keys_at(values, path):
            if key not in names:
                raise ConfigError(_unknown(str(key), names, path, keys))


def _keys_at(values: Any, path: str) -> list[Any]:
    """Return the keys of the values at a dotted path, "" for the top; [] where there are none."""
    for part in path.split(".") if path else ():
        values = values.get(part) if isinstance(values, Mapping) else None
    return [*values] if isinstance(values, Mapping) else []


def _taken(plain: dict[str, Any], path: str) -> Any:
    """Remove a section's values from the whole config, and return them."""
    top, _, name = path.partition(".")
    if not name:
        return plain.pop(top, {})
    holder = plain.get(top)
    return holder.pop(name, {}) if isinstance(holder, dict) else {}


def _check_moved(values: Mapping[str, Any], sections: Mapping[str, type]) -> None:
    """Raise ConfigError for a key that has another name today, with the new name; `was` of `option` has the old one."""
    for key, reason in REMOVED.items():
        top, _, name = key.partition(".")
        if isinstance(values.get(top), Mapping) and name in values[top]:
            raise ConfigError(f"there is no key {key} any more; {reason}")
    core = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    for path, cls in {**core, **sections}.items():
        if not dataclasses.is_dataclass(cls):
            continue
        for field in dataclasses.fields(cls):
            *holders, name = (field.metadata.get("was") or "").split(".")
            given: Any = values
            for holder in holders:
                given = given.get(holder) if isinstance(given, Mapping) else None
            if name and isinstance(given, Mapping) and name in given:
                new = f"{path}.{field.name}"
                raise ConfigError(f"the key {field.metadata['was']} is now {new}: write {new}={given[name]}")


def defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a config dataclass as plain nested values, `???` where a value is required."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            plain[field.name] = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            plain[field.name] = to_plain(field.default_factory())
        else:
            plain[field.name] = REQUIRED
    return plain


def config_values(config: Config) -> dict[str, Any]:
    """Return a whole config as plain nested values, each section at its keys: the input of `build_config`.

    A plugin's section with default values only is left out, so that the config can be read without the plugin.
    """
    plain = {key: value for key, value in to_plain(config).items() if key not in NO_KEYS}
    for path, section in config.sections.items():
        top, _, name = path.partition(".")
        if name:
            plain.setdefault(top, {})[name] = to_plain(section)
        elif (values := to_plain(section)) != defaults(type(section)):
            plain[top] = values
    return plain


def to_plain(value: Any) -> Any:
    """Return a config object as plain nested dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def check_schema(cls: type) -> None:
    """Raise ConfigError unless `cls` is a frozen dataclass whose fields all have types that `build` understands."""
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ConfigError(f"{cls.__qualname__} must be a frozen dataclass: put @dataclass(frozen=True) above it")
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"{cls.__qualname__}: a field's type cannot be resolved ({error}); import it in the module and define the "
            "class at module level"
        ) from error
    for field in dataclasses.fields(cls):
        if not _supported(hints[field.name]):
            raise ConfigError(
                f"{cls.__qualname__}.{field.name} has the type {type_name(hints[field.name])}; allowed are bool, int, "
                "float, str, None, Any, Literal, unions, list[T], dict[str, T] and frozen dataclasses"
            )


def type_name(hint: Any) -> str:
    """Return a type as short text, such as `int | null`."""
    if hint is Any:
        return "any"
    if hint is types.NoneType:
        return "null"
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(type_name(arg) for arg in args)}]"
    return getattr(hint, "__name__", str(hint))


def _supported(hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint in _SCALARS or origin is Literal:
        return True
    if origin in (Union, types.UnionType) or (origin is list and args):
        return all(_supported(arg) for arg in args)
    if origin is dict:
        return args[0] is str and _supported(args[1])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        check_schema(hint)
        return True
    return False


def _convert(value: Any, hint: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _literal(value, args, key)
    if origin in (Union, types.UnionType):
        return _union(value, args, hint, key)
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(_wrong(value, hint, key, f"; write {key}=[...]"))
        return [_convert(item, args[0], f"{key}[{position}]") for position, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(_wrong(value, hint, key, f"; write {key}={{name: value}}"))
        return {_convert(name, str, key): _convert(item, args[1], _join(key, name)) for name, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else build(hint, value, key)
    return _scalar(value, hint, key)


def _scalar(value: Any, hint: Any, key: str) -> Any:
    number = type(value) in (int, float)
    if hint is float and number and not math.isnan(value):
        return float(value)
    if hint is not float and type(value) is hint:
        return value
    remedy = f"; quote it to have it as text: {key}='\"{value}\"'" if hint is str and number else ""
    raise ConfigError(_wrong(value, hint, key, remedy))


def _literal(value: Any, allowed: tuple[Any, ...], key: str) -> Any:
    for option in allowed:
        if value == option and type(value) is type(option):
            return value
    names = [str(option) for option in allowed]
    raise ConfigError(f"{key} = {value!r} is not one of {', '.join(names)}.{did_you_mean(str(value), names)}")


def _union(value: Any, members: tuple[Any, ...], hint: Any, key: str) -> Any:
    if len(members) == 2 and types.NoneType in members:
        if value is None:
            return None
        return _convert(value, next(member for member in members if member is not types.NoneType), key)
    for member in members:
        # The first member that fits decides, in the order of the annotation.
        try:
            return _convert(value, member, key)
        except ConfigError:
            continue
    raise ConfigError(_wrong(value, hint, key, ""))


def _check_bounds(value: Any, metadata: Mapping[str, Any], key: str) -> None:
    low, high = metadata.get("min"), metadata.get("max")
    if value is None or isinstance(value, str) or (low is None and high is None):
        return
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = [f"at least {low:g}" if low is not None else "", f"at most {high:g}" if high is not None else ""]
        raise ConfigError(f"{key} = {value!r} is out of bounds: it must be {' and '.join(b for b in bounds if b)}")


def _unknown(key: str, allowed: list[str], path: str, keys: Sequence[str] = ()) -> str:
    """Return the message for an unknown key; `keys`: the dotted keys of all sections."""
    full, where = _join(path, key), f"under {path!r}" if path else "at the top"
    meant = OTHER_NAMES.get(key, key).split()
    elsewhere = [each for each in keys if each in meant or each.rpartition(".")[2] in meant]
    elsewhere += [each for each in keys if each.replace(".", "_") == key]
    near = did_you_mean(key, allowed)
    if 0 < len(elsewhere) <= MOST_HINTS:
        near = f" Did you mean {' or '.join(map(repr, elsewhere))}?"
    elif near and path:
        near = near.replace("'", f"'{path}.", 1)
    if key == "env" and path.startswith("eval.sets."):
        near = " The sets are played in the run's environment; to evaluate in another: rlcore eval RUN env=NAME."
    return f"unknown key {full!r}.{near} Allowed {where}: {', '.join(allowed) or 'none'}"


def _wrong(value: Any, hint: Any, key: str, remedy: str) -> str:
    return f"{key} = {value!r} has the wrong type: it is {_kind(value)} and must be {type_name(hint)}{remedy}"


def _kind(value: Any) -> str:
    names: dict[type, str] = {str: "text", type(None): "null", list: "a list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
