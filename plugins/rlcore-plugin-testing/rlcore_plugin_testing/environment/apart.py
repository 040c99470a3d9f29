"""Plays recorded episodes with an environment's own class in this process, and looks at what they do to it.

`python -m rlcore_plugin_testing.environment.apart leftovers|faults`: standard input is a pickle of (modules to import,
cloudpickle of (class or functions, config), episodes), an episode a list of calls (method, arguments); the answer on
standard output is JSON. Imports no torch.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

from rlcore.episodes.environment import EnvironmentFailure, EpisodeEnvironment, as_class

Calls = Sequence[tuple[str, tuple[Any, ...]]]
MOST_FAULTS = 200
"""Faults that are put into one episode: all up to 50, then every second one, and so on."""


class InjectedFault(Exception):
    """The exception that the suite raises within an environment's own code."""


def main() -> None:
    """Answer one question about an environment."""
    answer = os.dup(1)
    os.dup2(2, 1)  # the environment's own output
    imports, data, episodes = pickle.load(sys.stdin.buffer)
    for module in imports:
        importlib.import_module(module)
    target, config = pickle.loads(data)
    asked = {"leftovers": leftovers, "faults": faults}[sys.argv[1]]
    with os.fdopen(answer, "w") as file:
        json.dump(asked(as_class(target), config, episodes), file)


def leftovers(target: type, config: Any, episodes: Sequence[Calls]) -> list[str]:
    """Return the things that are there after some episodes and were not before.

    Files count from the first episode on, because it may import modules. The last episode is not played to its end: it
    is closed after `reset`.
    """
    before = _state()
    _play(target, config, episodes[0])
    before |= _files_now()
    for calls in [*episodes, episodes[0][:1]]:
        _play(target, config, calls)
    after = _state() | _files_now()
    return [f"{what} {name}" for what, names in after.items() for name in sorted(names - before[what])]


def faults(target: type, config: Any, episodes: Sequence[Calls]) -> dict[str, Any]:
    """Raise an exception at the lines of the class's file that each episode runs, one line at a time.

    Lines of tools are left out: a tool's exception is answered to the model. Returns the number of faults, and those
    that gave an episode with another result in place of a failure: {"faults": number, "hidden": [text, ...]}.
    """
    files = _files(target)
    count, hidden = 0, []
    for calls in episodes:
        tracer = _Tracer(files, -1)
        want = tracer.run(target, config, calls)
        stride = 1 + tracer.lines // (MOST_FAULTS // 4)
        for at in range(0, tracer.lines, stride):
            tracer = _Tracer(files, at)
            try:
                got = tracer.run(target, config, calls)
            except EnvironmentFailure:
                count += 1
                continue
            count += tracer.where != ""
            if got != want:
                hidden.append(f"{tracer.where}: {_difference(want, got)}")
    return {"faults": count, "hidden": hidden}


class _Tracer:
    """Counts the lines that an episode runs in some files, and raises InjectedFault at line number `at`."""

    def __init__(self, files: frozenset[str], at: int) -> None:
        self._files, self._at = files, at
        self.lines, self.where = 0, ""

    def run(self, target: type, config: Any, calls: Calls) -> list[Any]:
        """Play the episode and return its answers."""
        sys.settrace(self._enter)
        try:
            return _play(target, config, calls, before_close=lambda: sys.settrace(None))
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return self._line if code.co_filename in self._files and not _in_tool(frame) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if self.lines == self._at:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                self.lines += 1
                raise InjectedFault("raised by rlcore's conformance suite")
            self.lines += 1
        return self._line


def _play(target: type, config: Any, calls: Calls, before_close: Any = lambda: None) -> list[Any]:
    episode = EpisodeEnvironment(target, config)
    try:
        return [getattr(episode, method)(*arguments) for method, arguments in calls]
    finally:
        before_close()
        episode.close()


def _in_tool(frame: FrameType | None) -> bool:
    """Whether a frame runs within a tool."""
    while frame is not None:
        if frame.f_code is EpisodeEnvironment._use.__code__:
            return True
        frame = frame.f_back
    return False


def _files(target: type) -> frozenset[str]:
    """Return the files of a class's own code, and of its base classes'."""
    found = set()
    for base in target.__mro__:
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                found.add(code.co_filename)
    return frozenset(found)


def _difference(want: list[Any], got: list[Any]) -> str:
    for one, two in zip(want, got, strict=False):
        names = [name for name in one if one[name] != two.get(name)]
        if names:
            return f"{names[0]} was {two.get(names[0])!r:.80} in place of {one[names[0]]!r:.80}"
    return "the episode had another length"


def _state() -> dict[str, set[str]]:
    """Return what an episode must leave as it was, by kind."""
    gc.collect()
    return {
        "the thread": {f"{each.name} ({each.ident})" for each in threading.enumerate()},
        "the process": {f"{name} ({pid})" for pid, name in _children()},
        "the environment variable": {f"{name}={value}" for name, value in os.environ.items()},
        "the working directory": {os.getcwd()},
    }


def _files_now() -> dict[str, set[str]]:
    gc.collect()
    return {
        "the open file": set(_open_files()),
        "the temporary file": {entry.path for entry in os.scandir(tempfile.gettempdir())},
    }


def _children() -> list[tuple[int, str]]:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
            command, _, rest = stat.read().partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                found.append((int(name), command))
    return found


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of the listing itself
            found.append(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
    return [each for each in found if "/proc/" not in each]


if __name__ == "__main__":
    main()
