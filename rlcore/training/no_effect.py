"""Names the keys that a run never reads though they were set, by what `option(needs=...)` says of a key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.config import Config
from rlcore.config.build import defaults, to_plain
from rlcore.config.compose import sections_with_defaults
from rlcore.plugins import Role
from rlcore.roles.settings import role_config


def no_effect_lines(config: Config, roles: Mapping[str, Role]) -> list[str]:
    """Return a line for each key whose value is not the default and is read neither by the run nor by a role of it."""
    corrected = config.with_values({"trainer.importance": config.trainer.correction})
    seen = [corrected, *(role_config(corrected, name, role) for name, role in roles.items())]
    lines = []
    for path, section, standard in sections_with_defaults(config):
        for key, value, needs in _conditional(path, section, standard):
            if not any(_holds(condition, each) for condition in needs.split(" or ") for each in seen):
                lines.append(f"has no effect: {key}={_word(value)} (it needs {needs})")
    for key, value in config.unused.items():
        engine = key.rpartition(".")[0].replace(".", "=", 1)
        lines.append(f"has no effect: {key}={_word(value)} (the run does not use {engine})")
    for name, settings in config.roles.items():
        role = roles.get(name)
        if role is not None and not role.trains and settings.lr is not None:
            lines.append(f"has no effect: roles.{name}.lr={_word(settings.lr)} (role {name!r} does not train)")
    return lines


def _conditional(path: str, section: Any, standard: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the key, value and condition of each field that is not the default and has a condition, nested ones too."""
    for field in dataclasses.fields(section):
        key, value = f"{path}.{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _conditional(key, value, defaults(type(value)))
        elif (needs := field.metadata.get("needs")) and to_plain(value) != standard[field.name]:
            yield key, to_plain(value), needs


def _holds(condition: str, config: Config) -> bool:
    """Whether a key is set and not 0, or has one of the values, as in `KEY` or `KEY=A|B`.

    A key of a plugin that is not installed is not set.
    """
    key, _, allowed = condition.partition("=")
    path, _, name = key.rpartition(".")
    holder: Any = config.sections.get(path, config)
    for part in path.split(".") if holder is config else ():
        holder = getattr(holder, part, None)
    value = getattr(holder, name, None)
    return str(value) in allowed.split("|") if allowed else bool(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
