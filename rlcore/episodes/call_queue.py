"""Requests of a server's calls, brought from its event loop to the engine's thread, and the answers back."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Collection, Sequence

from rlcore.engine.rollout import Finished, Request, RolloutEngine
from rlcore.episodes.openai_format import RequestError

Watch = Callable[[str, Sequence[int]], None]
"""Called with a request's id and its tokens so far."""
Item = Callable[[list[Request]], None]
"""Called in the engine's thread with the list of new requests."""


class CallQueue:
    """A RequestSource whose requests come from coroutines of another thread.

    `answers` and `forget` belong to the event loop's thread; `done`, `poll`, `take` and `fail` to the engine's.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Finished]]] = {}
        self._watched: dict[str, Watch] = {}
        self._ended = False

    async def answers(self, requests: Sequence[Request], watch: Watch | None = None) -> list[Finished]:
        """Have requests sampled, and return their rows. RequestError, status 503, once the queue has ended.

        A caller that is cancelled has its requests aborted. `watch`: called in the caller's loop while they are
        sampled, if the engine can tell.
        """
        if self._ended:
            raise _ending()
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._waiting[request.id] = loop, future
            if watch is not None:
                self._watched[request.id] = watch
        self._items.put(lambda new: new.extend(requests))
        try:
            return await asyncio.gather(*futures)
        except BaseException:
            self._items.put(lambda new: self._abort({request.id for request in requests}, new))
            raise

    def forget(self, ids: Collection[str]) -> None:
        """Have the engine drop what it keeps of requests; see RolloutEngine.forget."""
        self._items.put(lambda new: self._engine.forget(ids))

    def end(self) -> None:
        """Take no more requests, and end `answer_requests` when those under way are answered. For any thread."""
        self._ended = True
        self._items.put(lambda new: None)  # wakes the engine's thread

    def begin(self) -> None:
        """Take requests again after `end`."""
        self._ended = False

    # ---- the engine's thread ----

    @property
    def done(self) -> bool:
        """See RequestSource."""
        return self._ended and self._items.empty() and not self._waiting and not self._engine.in_flight

    def poll(self, wait: float) -> Sequence[Request]:
        """See RequestSource."""
        new: list[Request] = []
        self._tell()
        try:
            item = self._items.get(timeout=wait) if wait else self._items.get_nowait()
            while True:
                item(new)
                item = self._items.get_nowait()
        except queue.Empty:
            return new

    def take(self, row: Finished) -> None:
        """See RequestSource."""
        loop, future = self._waiting.pop(row.id)
        self._watched.pop(row.id, None)
        loop.call_soon_threadsafe(_answer, future, row)

    def fail(self, error: RequestError) -> None:
        """Answer everything that waits with an error; the engine is idle."""
        self._watched.clear()
        self.poll(0.0)
        while self._waiting:
            _, (loop, future) = self._waiting.popitem()
            loop.call_soon_threadsafe(_answer, future, error)

    def _tell(self) -> None:
        """Show the tokens so far to those who watch."""
        if watched := dict(self._watched):  # the event loop's thread adds to it
            for name, tokens in self._engine.so_far(watched.keys() & set(self._engine.in_flight)).items():
                self._waiting[name][0].call_soon_threadsafe(watched[name], name, tokens)

    def _abort(self, ids: set[str], new: list[Request]) -> None:
        """Take requests out that nobody waits for any more."""
        for each in ids:
            self._waiting.pop(each, None)
            self._watched.pop(each, None)
        new[:] = [each for each in new if each.id not in ids]
        if decoding := ids & set(self._engine.in_flight):
            self._engine.abort(decoding)


def _ending() -> RequestError:
    return RequestError(503, "the server is ending", code="server_ending")


def _answer(future: asyncio.Future[Finished], result: Finished | RequestError) -> None:
    if future.done():  # its caller was cancelled
        return
    if isinstance(result, RequestError):
        future.set_exception(result)
    else:
        future.set_result(result)
