"""Code that rlcore calls must not end the command: sys.exit and os._exit would end it without a word, with status 0."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rlcore.errors import ExitError, PluginError, RLCoreError

leave_at_once = os._exit
"""The system's own exit, also within `exits_are_errors`."""

_OS_EXIT = "os._exit"
_work_has_begun = False


def work_begins() -> None:
    """Make an exit an ExitError (status 1) from now on: the run has begun, and its start is over."""
    global _work_has_begun
    _work_has_begun = True


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raise an error that names the place for an exit within the context.

    A PluginError before `work_begins`, then an ExitError. In another thread than the main one, os._exit prints the
    error and ends the process with its status. A forked process exits as it asks to.
    """
    global _work_has_begun
    _work_has_begun = False
    before, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            leave_at_once(status)
        end = SystemExit(f"{_OS_EXIT}({status})")
        if threading.current_thread() is not threading.main_thread():
            caller = sys._getframe(1)
            print(f"rlcore: {_text(end, caller.f_code.co_filename, caller.f_lineno)}", file=sys.stderr, flush=True)
            leave_at_once(1 if _work_has_begun else 2)
        raise end

    os._exit = refuse
    try:
        yield
    except SystemExit as end:
        raise exit_error(end) from end
    finally:
        os._exit = before


def exit_error(end: SystemExit) -> RLCoreError:
    """Return the error that names the place of an exit: a PluginError before `work_begins`, then an ExitError."""
    text = _text(end, *(place_of(end) or ("code that rlcore called", None)))
    return ExitError(text) if _work_has_begun else PluginError(text)


def is_late_exit(error: BaseException) -> bool:
    """Whether the error is an exit of others' code after `work_begins`."""
    return _work_has_begun and isinstance(error.__cause__, SystemExit)


def place_of(error: BaseException, outside: str | None = None) -> tuple[str, int | None] | None:
    """Return the file and line that raised an error, or that called os._exit; None if no file did.

    outside: a folder whose files do not count.
    """
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.isfile(frame.filename) and frame.filename != __file__ and os.path.dirname(frame.filename) != outside
        # wandb puts a function of its own in the place of sys.exit
        if not (isinstance(error, SystemExit) and frame.name == "exit")
    ]
    return frames[-1] if frames else None


def _text(end: SystemExit, file: str, line: int | None) -> str:
    by_system = isinstance(end.code, str) and end.code.startswith(_OS_EXIT)
    call = end.code if by_system else f"sys.exit({'' if end.code is None else repr(end.code)})"
    place = file if line is None else f"{file}, line {line},"
    return (
        f"{place} ended the command with {call}. Code that rlcore calls must not end its process: raise an exception, "
        "or start a process of its own for a program that exits"
    )
