"""The tests of one room, and the parts of the slow tests: `make quick ROOM=engine`, `make test-slow PART=1/6`.

A room is a folder of tests/ or a plugin. Which rooms are above a room follows from the layers in pyproject.toml.
As a pytest plugin (`-p rooms`) this file adds `--part`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = "rlcore-plugin-"

LAST = {
    "architecture": "imports and sizes of all of rlcore",
    "benchmarks": "the programs in benchmarks/",
    "crosscheck": "TRL's numbers: make crosscheck",
    "docs": "the pages",
    "e2e": "whole runs",
    "real": "a model that really speaks",
    "suite": "the tests' own programs",
}
"""Folders of tests/ that mirror no module of rlcore: they come after all other rooms."""
ON_TOP = {"algorithms": "they import rlcore's public names, as plugins do"}
"""Folders of tests/ above all layers. So are the plugins."""
NO_TESTS = {"fixtures"}

QUICK = "not ray and not slow and not alone and not gpu"
LONG = "e2e"
"""The mark of long tests. `make quick` leaves them out in every room but the one of that name."""
FILES_PER_PROCESS = 3
"""A process needs seconds to import torch, so a small room is tested in one."""


@dataclass(frozen=True)
class Part:
    """A part of the slow tests: what it shows, its files and folders, and a pattern of its tests' names in them."""

    shows: str
    paths: tuple[str, ...]
    names: str = ""

    def holds(self, test: str) -> bool:
        """Whether a test, such as tests/ops/test_gae.py::test_zero, is in this part."""
        file, _, name = test.partition("::")
        return any(Path(file).is_relative_to(path) for path in self.paths) and bool(re.match(self.names, name))


SUITES = f"plugins/{PLUGIN}testing/tests"
ALGORITHMS = (f"{SUITES}/test_all_on_ray.py", "tests/roles/test_adapters.py")
PARTS = (
    Part("algorithms A to M on Ray, and with adapters", ALGORITHMS, r"\w+\[[a-m]"),
    Part("algorithms N to Z on Ray, and with adapters", ALGORITHMS, r"\w+\[[n-z]"),
    Part("algorithms A to O on episodes", ("tests/episodes",), "test_[a-o]"),
    Part("algorithms P to Z on episodes", ("tests/episodes",), "test_[p-z]"),
    Part("engines: models, layouts, requests", ("tests/engines",)),
    Part(
        "whole runs, environments, the command, the cost of a call, a model that speaks",
        ("tests/e2e", "tests/real", f"{SUITES}/test_environment.py", f"{SUITES}/test_command.py", "tests/workers"),
    ),
)


# Rooms


def layers() -> list[set[str]]:
    """Return the modules of each layer of rlcore, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (lines,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [set(re.split(r" *[:|] *", line)) for line in lines]


def rooms() -> dict[str, Path]:
    """Return the folder of each room's tests."""
    folders = [
        path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in {*NO_TESTS, "__pycache__"}
    ]
    plugins = {path.parent.name: path for path in (ROOT / "plugins").glob(f"{PLUGIN}*/tests")}
    return {**{path.name: path for path in sorted(folders)}, **dict(sorted(plugins.items()))}


def height(room: str) -> int:
    """Return how far up a room is. Raises KeyError for a folder of tests/ that is neither in a layer nor declared."""
    heights = {module: place for place, layer in enumerate(reversed(layers())) for module in layer}
    if room in heights:
        return heights[room]
    if room in ON_TOP or room.startswith(PLUGIN):
        return len(heights)
    if room in LAST:
        return len(heights) + 1
    raise KeyError(room)


def above(room: str) -> list[str]:
    """Return the rooms above one, the lowest first."""
    names = [name for name in rooms() if height(name) > height(room)]
    return sorted(names, key=lambda name: (height(name), name))


def nearest(name: str) -> str:
    """Return words that offer rooms with similar names."""
    short = {room.removeprefix(PLUGIN): room for room in rooms()}
    close = [short[match] for match in difflib.get_close_matches(name.removeprefix(PLUGIN), short)]
    return f"Did you mean {' or '.join(close)}?" if close else f"The rooms are {', '.join(rooms())}."


# Commands


def quick(room: str, *, up: bool, testers: int) -> list[str]:
    """Return pytest's arguments for a room, or for it and the rooms above it."""
    names = [room, *(above(room) if up else ())]
    folders = [rooms()[name] for name in names]
    files = sum(1 for folder in folders for _ in folder.rglob("test_*.py"))
    processes = min(testers, files // FILES_PER_PROCESS)
    marks = QUICK if up or room == LONG else f"{QUICK} and not {LONG}"
    return [*(str(folder.relative_to(ROOT)) for folder in folders), "-m", marks, *in_processes(processes)]


def slow(part: str | None, *, testers: int) -> list[str]:
    """Return pytest's arguments for a part of the slow tests, such as 2/6, or for all."""
    chosen = [] if part is None else ["--part", part, *part_of(part).paths]
    return ["-m", "slow", *chosen, *in_processes(testers)]


def in_processes(number: int) -> list[str]:
    """Return pytest's arguments for several processes; the tests of a file stay in one."""
    return ["--numprocesses", str(number), "--dist", "loadfile"] if number > 1 else []


def part_of(name: str) -> Part:
    """Return the part called NUMBER/OF. Raises ValueError."""
    parts = {f"{number}/{len(PARTS)}": part for number, part in enumerate(PARTS, 1)}
    if name not in parts:
        raise ValueError("\n".join([f"no part {name!r}. The parts:", *(f"  {n}  {p.shows}" for n, p in parts.items())]))
    return parts[name]


def main(argv: Sequence[str]) -> int:
    """Run pytest."""
    parser = argparse.ArgumentParser(prog="rooms.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["quick", "slow"])
    parser.add_argument("--room", default="")
    parser.add_argument("--up", action="store_true", help="the rooms above it too")
    parser.add_argument("--part", help="of the slow tests; without it all")
    parser.add_argument("--testers", type=int, default=1, help="processes")
    given, further = parser.parse_known_args(argv)  # further options are pytest's
    if given.command == "quick" and given.room not in rooms():
        print(f"no room {given.room!r}. {nearest(given.room)}", file=sys.stderr)
        return 2
    try:
        if given.command == "quick":
            arguments = quick(given.room, up=given.up, testers=given.testers)
        else:
            arguments = slow(given.part, testers=given.testers)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # As `python -m pytest` has it; xdist's processes get this path too. None of it reaches what tests start.
    sys.path[0] = str(ROOT)
    sys.path.append(str(ROOT / "tests"))
    os.chdir(ROOT)
    return pytest.main(["-c", "pyproject.toml", "--rootdir", ".", "-p", "rooms", *arguments, *further])


# The pytest plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`."""
    parser.addoption("--part", metavar="NUMBER/OF", default=None, help="a part of the slow tests; see tests/rooms.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts."""
    if (name := config.getoption("part")) is not None:
        part = part_of(name)
        config.hook.pytest_deselected(items=[item for item in items if not part.holds(item.nodeid)])
        items[:] = [item for item in items if part.holds(item.nodeid)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
