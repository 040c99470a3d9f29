"""A call on the ranks of a group that may still be running."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from rlcore.protocol import DataProto
from rlcore.workers.contract import DeclaredResult


class Future(ABC):
    """One method call on the ranks of a group, running or ended. Executors subclass it.

    `was_read`: some caller has waited for the ranks, and so has seen their results or the failure.
    """

    def __init__(self) -> None:
        # Reentrant: `get` holds it and calls `settle`.
        self._lock = threading.RLock()
        self._collect: Callable[[list[Any]], Any] = list
        self._outputs: list[Any] | None = None
        self._result: Any = None
        self._is_collected = False
        self._error: Exception | None = None
        self.was_read = False

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return or raise at once."""

    @abstractmethod
    def wait(self) -> list[Any]:
        """Return every rank's result, None for a rank that was not called, or raise the first failure of any rank."""

    def declared_batches(self, declared: Sequence[DeclaredResult | None]) -> list[DataProto | None] | None:
        """Return each rank's declared result by reference, before the call has ended; None if that is impossible."""
        return None

    def collect_with(self, collect: Callable[[list[Any]], Any]) -> Self:
        """Have `get` return `collect(outputs)`, computed once; return this future."""
        self._collect = collect
        return self

    def settle(self) -> None:
        """Wait for the ranks, and keep their results or the failure."""
        with self._lock:
            if not self.is_settled:
                try:
                    self._outputs = self.wait()
                except Exception as error:
                    self._error = error

    def outputs(self) -> list[Any]:
        """Wait and return every rank's result, or raise the first failure; the same at every call."""
        self.settle()
        self.was_read = True
        if self._error is not None:
            # Without the earlier traceback, which would grow with every caller.
            raise self._error.with_traceback(None)
        assert self._outputs is not None
        return self._outputs

    def get(self) -> Any:
        """Wait and return the collected result, or raise the first failure of a worker; the same at every call."""
        with self._lock:
            outputs = self.outputs()
            if not self._is_collected:
                try:
                    self._result = self._collect(outputs)
                except Exception as error:
                    self._error = error
                    raise
                self._is_collected = True
            return self._result

    @property
    def is_settled(self) -> bool:
        """Whether the results or the failure are known here."""
        return self._outputs is not None or self._error is not None

    @property
    def succeeded(self) -> bool:
        """Whether the results are here. Never waits."""
        return self._outputs is not None

    def has_succeeded(self) -> bool:
        """Whether all ranks have returned. Never waits for them, but receives results that are complete."""
        if self.done():
            self.settle()
        return self.succeeded


def wait_for(futures: Sequence[Future]) -> None:
    """Wait for calls, in order, and raise the first error that no caller has seen yet."""
    for future in futures:
        if not future.was_read:
            future.get()


def resolve(value: Any) -> Any:
    """Return a call's argument with every Future in it replaced by its result, also inside lists, tuples and dicts.

    Waits for deferred DataProtos, whose columns are unknown until then. Does not wait for remote columns.
    """
    if isinstance(value, Future):
        return value.get()
    if isinstance(value, DataProto):
        _ = value.table  # waits for a deferred batch
        return value
    if type(value) in (list, tuple):
        return type(value)(resolve(item) for item in value)
    if type(value) is dict:
        return {key: resolve(item) for key, item in value.items()}
    return value
