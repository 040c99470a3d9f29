"""How a failure inside a worker reaches the controller; the same on every executor."""

from __future__ import annotations

import traceback

from rlcore.errors import RLCoreError, WorkerError
from rlcore.workers.worker import WorkerContext


def with_worker(error: BaseException, context: WorkerContext, method: str) -> RLCoreError:
    """Return what the controller raises for an exception in a worker's method.

    One of rlcore's own errors keeps its type and gets the worker's name in its message; anything else becomes a
    WorkerError that names role, rank, host and method and holds the worker's traceback.
    """
    where = f"{context}, in {method}()"
    trace = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, RLCoreError):
        try:
            named = type(error)(f"{error} [{where}]")
        except TypeError:  # its __init__ takes something other than a message
            return WorkerError(f"{where}: {type(error).__name__}: {error}\n\n{trace}")
        named.add_note(f"In the worker:\n{trace}")
        return named
    return WorkerError(f"{where}: {type(error).__name__}: {error}\n\n{trace}")
