"""How a process ended, and the end of a process group."""

from __future__ import annotations

import contextlib
import os
import signal


def how_it_ended(code: int) -> str:
    """Describe an exit code in words; it is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"ended its process with status {code}"
    hint = " (it may have used more memory than the machine has)" if code == -signal.SIGKILL else ""
    return f"ended its process by {signal_name(-code)}{hint}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; most real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_group(pid: int) -> None:
    """Kill the process group that the process `pid` leads or led, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: no permission for a group of zombies
        os.killpg(pid, signal.SIGKILL)
