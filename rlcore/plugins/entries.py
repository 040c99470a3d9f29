"""The installed plugins: their entry points, and the facts about each."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Literal

from rlcore.errors import PluginError, did_you_mean
from rlcore.exits import place_of
from rlcore.plugins.import_limit import import_limit

GROUP = "rlcore"
OWN = "rlcore"
"""The distribution whose plugins come with rlcore itself."""
UNKNOWN = "unknown"
"""The name and version of a distribution whose metadata lacks them."""
OBJECT = "object"
"""The kind of a plugin that a program gives as an object."""
UNREADABLE = "unreadable: "
"""How the value of the one entry point begins that stands for an entry_points.txt that cannot be read."""


@dataclass(frozen=True)
class PluginInfo:
    """One plugin: a row of `rlcore plugins`.

    `kind` is "algorithm", the part of the entry point's name before the dot, "local" for a file, or "object"; `file` is
    None for an object and for a plugin that was not imported; `gives` are the specs by kind and name, as "reward
    gsm8k"; `sha256` (hex) is that of a local file; `faults` lists the faults of a broken plugin.
    """

    name: str
    kind: str
    distribution: str | None
    version: str | None
    file: str | None
    hooks: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    state: Literal["loaded", "blocked", "broken"] = "loaded"
    sha256: str | None = None
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == OBJECT:
            return f"plugin {self.name!r} (an object given in Python)"
        origin = [f"{self.distribution} {self.version}" if self.distribution else "local file", self.file or ""]
        return f"plugin {self.name!r} ({', '.join(part for part in origin if part)})"

    def broken(self, *faults: str) -> PluginInfo:
        """Return the row of a plugin in which these faults were found."""
        return replace(self, state="broken", faults=(*self.faults, *faults))


class BrokenPlugin(PluginError):
    """A plugin with its faults; the message has the option that blocks it."""

    def __init__(self, info: PluginInfo, *faults: str) -> None:
        remedy = "" if info.kind == OBJECT else f"\nTo go on without it: -p no:{info.name}"
        super().__init__(f"{info}: {'; '.join(faults)}{remedy}")
        self.faults = faults


def installed() -> list[EntryPoint]:
    """Return the installed plugins' entry points in the order of loading, from metadata; imports nothing."""
    found: list[tuple[bool, str, EntryPoint]] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        # One whose metadata cannot be read breaks `entry_points()`, and so every command, whatever it brings.
        if f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            name, _ = _name_and_version(distribution)
            if name not in seen:
                found += [(name != OWN, entry.name, entry) for entry in _entries_of(distribution)]
            seen |= {name} - {UNKNOWN}
    return [entry for *_, entry in sorted(found, key=lambda each: each[:2])]


def _entries_of(distribution: metadata.Distribution) -> Sequence[EntryPoint]:
    try:
        return distribution.entry_points.select(group=GROUP)
    except Exception as error:  # importlib.metadata splits the lines and does not check them
        text = f"{UNREADABLE}{type(error).__name__}: {error}"
        name, _ = _name_and_version(distribution)
        return [EntryPoint(name, text, GROUP)._for(distribution)]  # type: ignore[attr-defined]


@lru_cache(maxsize=256)  # the entry points of a distribution share one object, which parses its metadata each time
def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Return a distribution's name and version, UNKNOWN for one that its metadata lacks."""
    facts = distribution.metadata
    name, version = (facts[key] if key in facts else UNKNOWN for key in ("Name", "Version"))  # noqa: SIM401
    return name, version


def is_own(entry: EntryPoint) -> bool:
    """Whether a plugin comes with rlcore itself."""
    return distribution_of(entry)[0] == OWN


def algorithm_of(entry_point: str) -> str | None:
    """Return the algorithm that an entry point of this name brings, None for one that brings something else."""
    return entry_point if "." not in entry_point else None


def command_of(entry_point: str) -> str | None:
    """Return the command that an entry point of this name brings: "plugins test" for command.plugins.test; or None."""
    kind, _, name = entry_point.partition(".")
    return name.replace(".", " ") if kind == "command" else None


def distribution_of(entry: EntryPoint) -> tuple[str, str]:
    """Return the name and version of the distribution that brings an entry point."""
    # Typed optional, but always set on the entry points of a distribution.
    assert entry.dist is not None
    return _name_and_version(entry.dist)


def info_of(entry: EntryPoint) -> PluginInfo:
    """Return the facts about an installed plugin before its import."""
    distribution, version = distribution_of(entry)
    kind = entry.name.partition(".")[0] if "." in entry.name else "algorithm"
    return PluginInfo(entry.name, kind, distribution, version, None)


def import_entry(entry: EntryPoint) -> tuple[ModuleType, None]:
    """Import the module of an entry point. Raises PluginError for one that names anything else."""
    if entry.value.startswith(UNREADABLE):
        raise PluginError(f"its entry_points.txt cannot be read: {entry.value.removeprefix(UNREADABLE)}")
    if re.fullmatch(r"\w+(\.\w+)*", entry.value) is None:
        raise PluginError(f"its entry point is {entry.value!r}; it must name a module, without ':'")
    with import_limit(f"plugin {entry.name!r} (module {entry.module})"):
        return importlib.import_module(entry.module), None


def check_blocked(blocked: Sequence[str], names: Sequence[str]) -> None:
    """Raise PluginError for an option `-p no:NAME` that fits no plugin."""
    for name in blocked:
        if name not in names:
            raise PluginError(
                f"-p no:{name} blocks nothing: no plugin has that name.{did_you_mean(name, names)} "
                f"Plugins: {', '.join(names)}"
            )


def cause_of(error: BaseException) -> str:
    """Name an error and the place in a plugin's code where it was raised."""
    place = place_of(error, outside=str(Path(__file__).parent))
    return f"{type(error).__name__}: {error}" + (f" ({place[0]}, line {place[1]})" if place else "")
