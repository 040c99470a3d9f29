"""A config as YAML: written to the run folder, read back by `--config FILE`, compared on resume."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlcore.config.build import build_config, config_values, to_plain
from rlcore.config.installed import Installed
from rlcore.config.schema import NO_KEYS, Config
from rlcore.errors import ConfigError, did_you_mean

CONFIG = "config.yaml"
"""The file with the config in a run folder."""
NOT_COMPARED = ("run", "tracker")
"""The sections that change nothing that a run computes, so a resume may change them."""

_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, as Python does; YAML 1.1 reads it as text."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that _Loader would read as a number, and escapes characters that only YAML treats as line breaks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        breaks = any(character in data for character in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if breaks else None)


_Dumper.add_representer(str, _Dumper.represent_str)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def to_yaml(config: Config) -> str:
    """Return the whole config as YAML; `from_yaml` reads it back."""
    return yaml.dump(config_values(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def from_yaml(text: str, plugins: Installed) -> Config:
    """Build the config that `to_yaml` wrote. Raises ConfigError for invalid values or an algorithm not installed."""
    values = _mapping(text, "the config")
    name = values.get("algorithm") or ""
    spec = plugins.algorithms().get(name)
    if name and spec is None:
        raise ConfigError(
            f"the config's algorithm {name!r} is not installed.{did_you_mean(name, plugins.algorithms())} Install its "
            "plugin, or give its file with -p FILE.py"
        )
    return build_config({"algorithm": "", **values}, spec.algorithm.config_class if spec else None, plugins)


def read_values(path: Path) -> dict[str, Any]:
    """Read a saved config as plain values, without `run.dir` and `run.name`: a repeated run has its own folder.

    `run.source` stays: a repeated fork starts from the same checkpoint.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the config file {str(path)!r} cannot be read: {error.strerror}") from error
    values = _mapping(text, str(path))
    run = values.pop("run", None) or {}
    if source := run.get("source"):
        values["run"] = {"source": source}
    return values


def run_dir_word(folder: Path) -> str:
    """Return the override `run.dir=FOLDER` as a word for the shell that hydra reads back as this path."""
    text = str(folder)
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", text) is not None and text.lower() not in ("null", "true", "false")
    if not plain or _is_number(text):
        ending = len(text) - len(text.rstrip("\\"))  # backslashes that a quote follows are doubled
        text = '"' + text.replace('"', r"\"") + "\\" * ending + '"'
    return shlex.quote(f"run.dir={text}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def has_begun(folder: Path) -> bool:
    """Whether a run folder holds results that only the same config may continue."""
    return any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "summary.json"))


def begun_values(folder: Path) -> dict[str, Any]:
    """Return the plain values of the run that has begun in a folder; {} without one."""
    file = folder / CONFIG
    return read_values(file) if file.is_file() and has_begun(folder) else {}


def same_run(a: Config, b: Config) -> list[str]:
    """Return the dotted keys in which two configs differ, in the schema's order; empty when one resumes the other.

    Not compared are incidental keys (see `option`), which change at most the order of sums or the run's length, and the
    sections of NOT_COMPARED.
    """
    left, right = dict(_identity(a)), dict(_identity(b))
    return [key for key in {**left, **right} if left.get(key, ...) != right.get(key, ...)]


def _identity(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values that identify a run: those that change its numbers."""
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if field.name in (*NOT_COMPARED, *NO_KEYS):
            continue
        if dataclasses.is_dataclass(part):
            yield from _lasting(part, field.name)
        else:
            yield field.name, part
    for path, section in config.sections.items():
        yield from _lasting(section, path)


def _lasting(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        if not field.metadata.get("incidental"):
            yield from _flat({field.name: to_plain(getattr(section, field.name))}, f"{path}.")


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value.removeprefix("./") if isinstance(value, str) else value  # the same folder


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must hold a mapping of keys to values, not {type(values).__name__}")
    return values
