"""Writes a new plugin distribution from the templates in `template/`, for `rlcore new-plugin NAME`."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template

from rlcore.errors import ConfigError
from rlcore.plugins.entries import distribution_of, installed

PREFIX = "rlcore-plugin-"
FILES = {
    "$module.py": "algorithm.py",
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "tests/test_$name.py": "test.py",
    ".github/workflows/test.yml": "ci.yml",
}
"""Each file of the distribution and the template that it is made from, without the ending .tmpl."""


def new_plugin(name: str, parent: Path) -> list[Path]:
    """Write the distribution rlcore-plugin-NAME into `parent` and return its folder and its files.

    The algorithm is called `name` with underscores for hyphens. Raises ConfigError, with nothing written, for a name
    that cannot be an algorithm's or is taken, and for a folder that is there or cannot be made.
    """
    algorithm = name.removeprefix(PREFIX).replace("-", "_")
    _check_name(name, algorithm)
    folder = parent / (PREFIX + algorithm.replace("_", "-"))
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is overwritten; choose another name or another --dir")
    names = {
        "name": algorithm,
        "distribution": folder.name,
        "module": folder.name.replace("-", "_"),
        "cls": "".join(part[:1].upper() + part[1:] for part in algorithm.split("_")),
    }
    templates = resources.files("rlcore.plugins") / "template"
    texts = {
        folder / Template(target).substitute(names): Template(
            (templates / f"{source}.tmpl").read_text(encoding="utf-8")
        ).substitute(names)
        for target, source in FILES.items()
    }
    try:
        folder.mkdir(parents=True)
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; choose another --dir") from error
    return [folder, *texts]


def _check_name(given: str, name: str) -> None:
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
            f"{given!r} cannot be a plugin's name: algo={name} would be read as a value; add a word, as my-{given}"
        )
    for entry in installed():
        # Names of distributions are equal without regard to case.
        if entry.name.lower() == name.lower():
            owner = " ".join(distribution_of(entry))
            raise ConfigError(f"an algorithm {entry.name!r} is installed already, by {owner}; choose another name")
