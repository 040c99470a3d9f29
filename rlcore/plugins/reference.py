"""The page docs/hooks.md, made from the hook specifications.

`python -m rlcore.plugins.reference hooks` prints it; with `configuration` it prints docs/configuration.md, as only the
plugins know the engines' keys.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from rlcore.config.reference import markdown as configuration
from rlcore.plugins import hookspecs
from rlcore.plugins.checks import HOOKS
from rlcore.plugins.manager import own_sections
from rlcore.plugins.specs import API_VERSION

_INTRODUCTION = f"""\
# Hooks

<!-- Made by `python -m rlcore.plugins.reference hooks`. Edit rlcore/plugins/hookspecs.py instead. -->

A plugin is a module that states `RLCORE_API = {API_VERSION}` and implements hooks. Installed plugins are entry points
of the group `rlcore`: `NAME` for the algorithm NAME, `KIND.NAME` for anything else. `-p path/file.py` loads a local
file, `-p no:NAME` leaves a plugin out, `rlcore plugins` lists all, `--trace-hooks` prints each call.
"""


def markdown() -> str:
    """Return the page docs/hooks.md."""
    rules = inspect.getdoc(hookspecs) or ""
    parts = [_INTRODUCTION, rules.partition("\n\n")[2]]
    for title, names in (
        ("Registration", [name for name in HOOKS if not _parameters(HOOKS[name])]),
        ("Life cycle", [name for name in HOOKS if _parameters(HOOKS[name])]),
    ):
        parts.append(f"\n## {title}")
        parts += [_section(name, HOOKS[name]) for name in names]
    return "\n".join(parts) + "\n"


def _section(name: str, hook: Callable[..., Any]) -> str:
    doc = inspect.getdoc(hook) or ""
    items = re.sub(r"(?m)^(When|Returns|Errors):", r"- \1:", doc)
    items = re.sub(r"(?m)^(?!- )(?=.)", "  ", items.partition("\n\n")[2])
    signature = str(inspect.signature(hook)).replace("'", "")
    return f"\n### {name}\n\n`{name}{signature}`\n\n{doc.partition(chr(10))[0]}\n\n{items}"


def _parameters(hook: Callable[..., Any]) -> list[str]:
    """Return the names of a hook's arguments; a registration hook has none."""
    return list(inspect.signature(hook).parameters)


if __name__ == "__main__":
    pages = {"hooks": markdown, "configuration": lambda: configuration(own_sections())}
    print(pages[sys.argv[1]](), end="")
