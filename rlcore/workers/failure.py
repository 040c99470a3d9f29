"""The error that the controller raises for a failure inside a worker, on every executor."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.errors import RLCoreError, WorkerError
from rlcore.workers.worker import WorkerContext


@contextmanager
def naming_errors(context: WorkerContext, method: str) -> Iterator[None]:
    """Raise the controller's error in place of any that a worker's method raises."""
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise worker_failure(error, context, method) from error


def worker_failure(error: BaseException, context: WorkerContext, method: str) -> RLCoreError:
    """Return the controller's error for an exception in a worker's method.

    An error of rlcore's own keeps its type, and its message gets the worker's name. Any other exception becomes a
    WorkerError that names role, rank, host and method and contains the worker's traceback.
    """
    where = f"{context}, in {method}()"
    trace = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, RLCoreError):
        # A new error of the same type, as the message of the original cannot be changed.
        try:
            named = type(error)(f"{error} [{where}]")
        except TypeError:  # its __init__ does not take a single message
            return WorkerError(f"{where}: {type(error).__name__}: {error}\n\n{trace}")
        named.add_note(f"In the worker:\n{trace}")
        return named
    return WorkerError(f"{where}: {type(error).__name__}: {error}\n\n{trace}")
