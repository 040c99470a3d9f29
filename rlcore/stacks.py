"""A process prints the stacks of all its threads when it gets SIGUSR2, also while it hangs in C code.

Ray's dashboard uses the same signal for its own stacks; Ray Tune takes SIGUSR1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

STACK_SIGNAL = signal.SIGUSR2
FOLDER_VARIABLE = "RLCORE_STACKS"


def register_stacks() -> None:
    """Print the stacks on SIGUSR2 from now on; a process that never calls this is ended by the signal.

    They go to standard error, or to the file PID.txt of the folder in the environment variable RLCORE_STACKS. A forked
    process calls this again, for a file of its own. A handler that the program has for the signal stays.
    """
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return
    output = 2
    if folder := os.environ.get(FOLDER_VARIABLE):
        # A folder that is not there, as on another node, is no reason to stop a run.
        with contextlib.suppress(OSError):
            output = os.open(f"{folder}/{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file=output, all_threads=True, chain=False)
