"""Calls with which a child process prepares itself. Most of them act on Linux alone.

It imports little and no torch: each process pays for it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. `parent` is that thread's process id."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_core_files() -> None:
    """Have no file with this process's memory written when it crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(megabytes: int, pid: int = 0) -> None:
    """Limit the address space of a process, in MiB; `pid` 0 is this process, `megabytes` 0 is no limit."""
    if megabytes and sys.platform == "linux":  # macOS does not enforce RLIMIT_AS and may refuse to set it
        hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
        wanted = megabytes * 2**20
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
