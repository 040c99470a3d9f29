"""Writes a new plugin distribution from the templates in `template/`, for `rlcore new-plugin NAME`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins.entries import distribution_of, installed

PREFIX = "rlcore-plugin-"


@dataclass(frozen=True)
class NewKind:
    """A kind of plugin that can be written.

    group: its config group: `GROUP=NAME` chooses the plugin. entry_point: the name of its entry point. use: the
    overrides of `rlcore train` that use it. templates: those that differ from kind to kind, by file; the same file is
    made from the same template, without the ending .tmpl, otherwise.
    """

    group: str
    entry_point: str
    use: str
    templates: Mapping[str, str]


KINDS = {
    "algorithm": NewKind(
        group="algo",
        entry_point="$name",
        use="algo=$name",
        templates={"$module.py": "algorithm.py", "README.md": "README.md", "tests/test_$name.py": "test.py"},
    ),
    "environment": NewKind(
        group="env",
        entry_point='"environment.$name"',
        use="experiment=quickstart env=$name data.prompt_len=1024 rollout.response_len=256",
        templates={
            "$module.py": "environment.py",
            "README.md": "environment_readme.md",
            "tests/test_$name.py": "environment_test.py",
        },
    ),
}
"""The kinds by name; the first is the default."""
FILES = {"pyproject.toml": "pyproject.toml", ".github/workflows/test.yml": "ci.yml"}
"""Each file of every distribution and the template that it is made from, without the ending .tmpl."""


def new_plugin(name: str, parent: Path, kind: str = "algorithm") -> list[Path]:
    """Write the distribution rlcore-plugin-NAME into `parent` and return its folder and its files, the module first.

    The plugin is called `name` with underscores for hyphens. Raises ConfigError, with nothing written, for an unknown
    kind, for a name that cannot be a plugin's or is taken, and for a folder that is there or cannot be made.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: unknown kind.{did_you_mean(kind, KINDS)} Kinds: {', '.join(KINDS)}")
    chosen = KINDS[kind]
    plugin = name.removeprefix(PREFIX).replace("-", "_")
    _check_name(name, plugin, kind)
    folder = parent / (PREFIX + plugin.replace("_", "-"))
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is overwritten; choose another name or another --dir")
    names = {
        "name": plugin,
        "distribution": folder.name,
        "module": folder.name.replace("-", "_"),
        "cls": "".join(part[:1].upper() + part[1:] for part in plugin.split("_")),
        "kind": kind,
        "group": chosen.group,
    }
    names |= {key: Template(getattr(chosen, key)).substitute(names) for key in ("entry_point", "use")}
    templates = resources.files("rlcore.plugins") / "template"
    texts = {
        folder / Template(target).substitute(names): Template(
            (templates / f"{source}.tmpl").read_text(encoding="utf-8")
        ).substitute(names)
        for target, source in {**chosen.templates, **FILES}.items()
    }
    try:
        folder.mkdir(parents=True)
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; choose another --dir") from error
    return [folder, *texts]


def use_of(name: str, kind: str) -> str:
    """Return the overrides with which `rlcore train` uses a plugin."""
    return Template(KINDS[kind].use).substitute(name=name)


def _check_name(given: str, name: str, kind: str) -> None:
    """Raise ConfigError unless `name` can be an identifier, a distribution's name and a word of the command line."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name):
        raise ConfigError(
            f"{given!r} cannot be a plugin's name; it starts with a letter, goes on with letters, digits and hyphens, "
            "and does not end with a hyphen, such as my-algo"
        )
    if keyword.iskeyword(name):
        raise ConfigError(f"{given!r} cannot be a plugin's name: {name} is a word of Python; add a word, as my-{given}")
    if name.lower() in ("null", "true", "false", "inf", "nan"):
        raise ConfigError(
            f"{given!r} cannot be a plugin's name: {KINDS[kind].group}={name} would be read as a value; add a word, as "
            f"my-{given}"
        )
    for taken, owner in _taken(kind):
        # Names of distributions are equal without regard to case.
        if taken.lower() == name.lower():
            raise ConfigError(f"an {kind} {taken!r} is installed already, by {owner}; choose another name")


def _taken(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the installed plugins of a kind, each with its distribution. Imports no plugin to find algorithms."""
    if kind == "algorithm":
        for entry in installed():
            yield entry.name, " ".join(distribution_of(entry))
        return
    from rlcore.plugins.manager import PluginManager

    for info in PluginManager.inspect().list():
        for given in info.gives:
            what, _, name = given.rpartition(" ")
            if what == kind:
                yield name, f"{info.distribution} {info.version}"
