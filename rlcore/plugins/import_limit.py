"""A file or module that hangs while it is imported ends the command, with its name and its stack."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.errors import ConfigError
from rlcore.exits import leave_at_once

VARIABLE, DEFAULT = "RLCORE_IMPORT_TIMEOUT", 60.0


@contextmanager
def import_limit(what: str) -> Iterator[None]:
    """End the process with status 2 if the import of `what`, in the context, takes more than RLCORE_IMPORT_TIMEOUT.

    The variable is in seconds: 60 by default, 0 for no limit. A hang in C code that holds Python's lock is not ended.
    """
    seconds = import_timeout()
    if not seconds:
        yield
        return
    timer = threading.Timer(seconds, _give_up, (what, seconds, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def import_timeout() -> float:
    """Return the seconds of RLCORE_IMPORT_TIMEOUT. Raises ConfigError for a value that is not a number of seconds."""
    text = os.environ.get(VARIABLE, str(DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ConfigError(f"{VARIABLE}={text!r} is no number of seconds; give one of 0 or more, where 0 is no limit")
    return seconds


def _give_up(what: str, seconds: float, thread: int) -> None:
    """End the process: an import cannot be stopped from outside."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    stack = traceback.format_list([frame for frame in frames if not frame.filename.startswith("<frozen ")])
    print(
        f"{''.join(stack)}rlcore: {what} was not imported within {seconds:g} s; the stack above shows where it is. Do "
        f"nothing at import that can wait for ever, or set {VARIABLE} to more seconds, 0 for no limit",
        file=sys.stderr,
        flush=True,
    )
    leave_at_once(2)
