"""The event loop of a worker process, on which its `async def` methods run between those that are not."""

from __future__ import annotations

import asyncio
import inspect
import selectors
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

STOP_SECONDS = 10.0
"""Seconds that coroutines have to end when they are cancelled."""
CANCELLED = "the group was shut down"


def is_async(cls: type, method: str) -> bool:
    """Whether a method of a class is `async def`, also under decorators that use `functools.wraps`."""
    function = getattr(cls, method, None)
    return callable(function) and inspect.iscoroutinefunction(inspect.unwrap(function))


def has_async_methods(classes: Iterable[type]) -> bool:
    """Whether one of the classes has an `async def` method."""
    return any(is_async(cls, name) for cls in classes for name in dir(cls))


class MethodLoop:
    """An event loop in a thread of its own, which starts with the first coroutine.

    The code of coroutines and the code within `alone` take turns; a coroutine gives its turn away when it awaits.
    `takes_turns=False`: only from the first coroutine on.
    """

    def __init__(self, *, takes_turns: bool) -> None:
        self._takes_turns = takes_turns
        self._turn, self._next = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[Future[Any]] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rlcore-coroutines", daemon=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no coroutine of the loop run code until the context ends."""
        if not self._takes_turns or self._owner == threading.get_ident():
            yield
            return
        self._take_turn()
        try:
            yield
        finally:
            self._end_turn()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine up to its first await, and return the future of its result."""
        if self._loop is None:
            self._takes_turns = True
            self._loop = asyncio.SelectorEventLoop(_Selector(self))
            self._thread.start()
        loop = self._loop
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._running.add(future)  # which asyncio itself refers to weakly
        future.add_done_callback(self._running.discard)
        if threading.current_thread() is not self._thread:
            # The next call may not overtake this one. The loop makes the task first, and takes its first step next.
            begun = threading.Event()
            loop.call_soon_threadsafe(loop.call_soon, begun.set)
            begun.wait()
        return future

    def cancel(self) -> None:
        """Cancel all coroutines, and wait until they have ended, up to STOP_SECONDS."""
        if self._loop is not None:
            # One that runs on ends with the program, as the thread is a daemon.
            wait([asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)], 2 * STOP_SECONDS)

    def stop(self) -> None:
        """End the thread. A second call does nothing."""
        if self._loop is not None:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
            self._loop = None

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        self._take_turn()
        try:
            while not self._stopping:
                # asyncio raises an exit of a task here too, whose result it is already.
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_forever()
            loop.close()
        finally:
            self._end_turn()

    def _take_turn(self) -> None:
        # Who waits for the turn holds `_next`, so that nobody takes two turns in a row while another waits.
        with self._next:
            self._turn.acquire()
        self._owner = threading.get_ident()

    def _end_turn(self) -> None:
        self._owner = None
        self._turn.release()


class _Selector(selectors.DefaultSelector):
    """Gives the turn of the loop's thread away while it waits for events."""

    def __init__(self, turns: MethodLoop) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns._end_turn()
        try:
            return super().select(timeout)
        finally:
            self._turns._take_turn()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel(CANCELLED)
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_SECONDS)


@types.coroutine
def in_steps(
    coroutine: Coroutine[Any, Any, Any], within: Callable[[], AbstractContextManager[Any]]
) -> Generator[Any, Any, Any]:
    """Await a coroutine, with each of its steps from one await to the next within a context of its own."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        with within():
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
        try:
            value, resume = (yield awaited), coroutine.send
        except BaseException as error:
            value, resume = error, coroutine.throw
