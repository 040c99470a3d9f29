"""The processes of this machine that descend from this one, as /proc lists them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlcore_plugin_testing.report import NotApplicable

PROC = Path("/proc")
CHILD = "rlcore.episodes.child"
"""The module that environment processes run."""


@dataclass(frozen=True)
class Process:
    """A process: ids are used again, so the time of its start in clock ticks belongs to its identity."""

    pid: int
    parent: int
    start: int
    command: str

    @property
    def is_alive(self) -> bool:
        """Whether it runs; one that ended and was not collected does not."""
        found = _read(self.pid)
        return found is not None and found.start == self.start


def descendants(root: int | None = None) -> list[Process]:
    """Return the processes that descend from `root` (default: this one) and run, parents first."""
    if sys.platform != "linux":
        raise NotApplicable("processes are counted by /proc, which only Linux has")
    every = [_read(int(name)) for name in os.listdir(PROC) if name.isdigit()]
    of_parent: dict[int, list[Process]] = {}
    for process in filter(None, every):
        of_parent.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = [os.getpid() if root is None else root]
    while level:
        children = [child for pid in level for child in of_parent.get(pid, [])]
        found += children
        level = [child.pid for child in children]
    return found


def kill_environments(others: Collection[Process] = ()) -> int:
    """Kill the processes that play episodes, and return their number.

    These are the children of the one that has loaded the environment. Where none has, as with agents, they are all
    descendants of this process but `others`.
    """
    found = descendants()
    loaded = {process.pid for process in found if CHILD in process.command}
    if loaded:
        killed = [process for process in found if process.pid in loaded and process.parent in loaded]
    else:
        killed = [process for process in found if process not in others]
    for process in killed:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return len(killed)


def left_running(processes: Iterable[Process], patience: float) -> list[Process]:
    """Return those of the processes that still run after `patience` seconds; return as soon as none does."""
    until = time.monotonic() + patience
    left = [process for process in processes if process.is_alive]
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [process for process in left if process.is_alive]
    return left


def _read(pid: int) -> Process | None:
    """Return a process; None for one that has ended."""
    try:
        name, _, rest = (PROC / str(pid) / "stat").read_text().rpartition(")")
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[19]), command or name.partition("(")[2])
