"""The parent's side of environment processes: calls that do not block, time limits, and failures by episode."""

from __future__ import annotations

import json
import logging
import os
import pickle
import selectors
import socket
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.episodes.child import ENDED, FORKED, LOST, MOST_REPLY
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.fork_server import ForkServer
from rlcore.episodes.packing import PackedEnvironment, load_from_file, pack
from rlcore.errors import DataError
from rlcore.processes.ends import how_it_ended
from rlcore.processes.frames import FrameBuffer, FrameError, frame

__all__ = ["EnvironmentPool", "PackedEnvironment", "load_from_file", "pack"]

Answer = dict[str, Any] | EnvironmentFailure

_log = logging.getLogger(__name__)
_SEND_TIMEOUT = 60.0  # seconds until a slot's process runs and has its request
_PROGRESS_TIMEOUT = 5.0  # seconds between two parts of a request or an answer: this process may come late to them
_STATUS_TIMEOUT = 1.0  # seconds between the end of a slot's connection and the notice of how its process ended
_ANSWERS = {
    "reset": {"prompt", "seat"},
    "turn": {"messages", "reward", "done", "seat", "tool_calls", "tool_errors", "scores"},
    "finish": {"scores"},
    "release": {"spent"},
}
"""The keys of each method's reply."""


@dataclass(eq=False)
class _Slot:
    """An environment process.

    `call`: the method that it was asked for and has not answered, or empty; `label` names it in messages; `number`
    counts calls. `episode` is None once it was released; `failed`: one of its calls failed. `pid` is 0 until the
    process runs. `ended`: the connection is at its end, but how the process ended is not known yet.
    """

    key: int
    connection: socket.socket
    episode: str | None = None
    call: str = ""
    label: str = ""
    number: int = 0
    failed: bool = False
    pid: int = 0
    deadline: float = float("inf")
    ended: bool = False
    outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    incoming: FrameBuffer = field(default_factory=lambda: FrameBuffer(MOST_REPLY))


class EnvironmentPool:
    """Processes that play episodes, forked from one that has loaded the environment. Not for several threads.

    An episode has its place from `reset` to `release`, also when it has failed. Calls return at once; `poll` gives one
    answer to each `reset`, `turn` and `finish`. An episode has one call at a time. The processes have sessions of their
    own, so Ctrl-C does not reach them, and they end with this process, however it ends.
    """

    def __init__(
        self,
        environment: PackedEnvironment,
        *,
        processes: int,
        timeout: float,
        memory_mb: int,
        keep_env: Sequence[str] = (),
    ) -> None:
        """`timeout`: seconds for one call. `memory_mb`: limit of a process's address space in MiB (0: none).

        `keep_env`: names of environment variables that the processes get beside the basic ones.
        """
        self._environment, self._processes, self._timeout = environment, processes, timeout
        self._memory_mb, self._keep_env = memory_mb, tuple(keep_env)
        self._server: ForkServer | None = None
        self._selector: selectors.BaseSelector | None = None
        self._slots: dict[int, _Slot] = {}
        self._forked = 0  # slots so far
        self._idle: list[_Slot] = []
        self._episodes: dict[str, _Slot | None] = {}  # None: it waits for a process, or its process has ended
        self._waiting: dict[str, bytes] = {}  # the `reset` requests of episodes that wait for a process
        self._lost: dict[str, str] = {}  # episodes whose process ended between two calls, and how
        self._answers: deque[tuple[str, Answer]] = deque()
        self._end: weakref.finalize | None = None

    def start(self) -> None:
        """Start the process that forks the others, if it does not run. ConfigError if the environment cannot load."""
        if self._server is None:
            self._server = server = ForkServer(self._environment, self._memory_mb, self._keep_env)
            self._selector = selectors.DefaultSelector()
            self._selector.register(server.control, selectors.EVENT_READ)
            self._end = weakref.finalize(self, _end, self._slots, server, self._selector)

    @property
    def free(self) -> int:
        """Number of episodes that can begin."""
        return self._processes - len(self._episodes)

    def reset(self, episode: str, row: Mapping[str, Any], seed: int) -> None:
        """Begin an episode: EpisodeEnvironment.reset. DataError for a row that cannot be pickled."""
        if episode in self._episodes:
            raise ValueError(f"episode {episode!r} has not been released")
        if self.free < 1:
            raise ValueError(f"all {self._processes} environment processes have an episode")
        try:
            request = pickle.dumps(("reset", (dict(row), seed)), protocol=5)
        except Exception as error:  # pickling runs code of the objects that it meets
            raise DataError(
                f"the row of episode {episode!r} cannot be sent to its environment: {type(error).__name__}: {error}"
            ) from error
        self._episodes[episode] = None
        self._waiting[episode] = request
        self._place()

    def turn(self, episode: str, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> None:
        """Give the environment an assistant's message and its tool calls: EpisodeEnvironment.turn."""
        names = ", ".join(str(call["name"]) for call in calls if "name" in call)
        label = f"turn (tool {names})" if names else "turn"
        self._call(episode, label, "turn", dict(message), [dict(call) for call in calls])

    def finish(self, episode: str, cut: Mapping[str, Any] | None = None) -> None:
        """End an episode that its environment has not ended, and ask for its scores: EpisodeEnvironment.finish."""
        self._call(episode, "finish", "finish", None if cut is None else dict(cut))

    def release(self, episode: str) -> None:
        """Free the episode's place. Its environment is closed, after the call under way if there is one."""
        slot = self._episodes.pop(episode)
        self._waiting.pop(episode, None)
        self._lost.pop(episode, None)
        self._answers = deque(each for each in self._answers if each[0] != episode)
        if slot is not None:
            slot.episode = None
            if not slot.call:
                self._close_environment(slot)

    def poll(self, wait: float) -> list[tuple[str, Answer]]:
        """Return the answers that have come: as soon as there is one, at the latest after `wait` seconds.

        A failed call answers with EnvironmentFailure: an exception of the environment, an ended process, or a time-out
        (the process is then killed).
        """
        until = time.monotonic() + wait
        while True:
            self._work(0.0 if self._answers else max(0.0, until - time.monotonic()))
            if self._answers or time.monotonic() >= until:
                answers, self._answers = list(self._answers), deque()
                return answers

    def close(self) -> None:
        """End all processes. The environments of episodes that were not released are closed, within GRACE seconds."""
        if self._end is not None:
            self._end()
        self._forget_server()
        for state in (self._episodes, self._waiting, self._lost, self._answers):
            state.clear()

    def __enter__(self) -> EnvironmentPool:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Calls

    def _place(self) -> None:
        """Give processes to episodes that wait for one, in their order."""
        while self._waiting and (self._idle or len(self._slots) < self._processes):
            self.start()
            slot = self._idle.pop() if self._idle else self._fork()
            slot.episode, slot.failed = next(iter(self._waiting)), False
            self._episodes[slot.episode] = slot
            self._send(slot, "reset", "reset", self._waiting.pop(slot.episode))

    def _fork(self) -> _Slot:
        assert self._server is not None
        assert self._selector is not None
        self._forked += 1
        slot = self._slots[self._forked] = _Slot(self._forked, self._server.fork(self._forked))
        self._selector.register(slot.connection, selectors.EVENT_READ, slot)
        return slot

    def _call(self, episode: str, label: str, method: str, *arguments: Any) -> None:
        slot = self._episodes[episode]
        if slot is None:
            how = self._lost.get(episode)
            if how is None:
                raise ValueError(f"episode {episode!r} has failed, or has a call under way: reset")
            self._answers.append((episode, EnvironmentFailure(f"the environment {how} between two calls")))
        elif slot.call or slot.failed:
            raise ValueError(f"episode {episode!r} has failed, or has a call under way: {slot.label}")
        else:
            self._send(slot, method, label, pickle.dumps((method, arguments), protocol=5))

    def _close_environment(self, slot: _Slot) -> None:
        self._send(slot, "release", "close", pickle.dumps(("release", ())))

    def _send(self, slot: _Slot, method: str, label: str, request: bytes) -> None:
        slot.call, slot.label, slot.number = method, label, slot.number + 1
        if not slot.ended:
            slot.outgoing = memoryview(frame(request, slot.number))
            slot.deadline = time.monotonic() + _SEND_TIMEOUT
            self._write(slot)

    def _write(self, slot: _Slot) -> None:
        """Send what the connection takes. The call's time begins when its process runs and everything is sent."""
        assert self._selector is not None
        try:
            while slot.outgoing:
                slot.outgoing = slot.outgoing[slot.connection.send(slot.outgoing) :]
        except BlockingIOError:
            slot.deadline = max(slot.deadline, time.monotonic() + _PROGRESS_TIMEOUT)
            self._selector.modify(slot.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, slot)
            return
        except (BrokenPipeError, ConnectionResetError):  # reading its end says why
            slot.outgoing = memoryview(b"")
        self._selector.modify(slot.connection, selectors.EVENT_READ, slot)
        if slot.pid:
            slot.deadline = time.monotonic() + self._timeout

    # Answers

    def _work(self, wait: float) -> None:
        """Send and receive what is ready, waiting at most `wait` seconds for it, and end calls whose time is over."""
        if self._selector is None or self._server is None:
            time.sleep(wait)
            return
        write = 0 if self._server.flush() else selectors.EVENT_WRITE
        self._selector.modify(self._server.control, selectors.EVENT_READ | write)
        deadline = min((slot.deadline for slot in self._slots.values()), default=float("inf"))
        for key, events in self._selector.select(min(wait, max(0.0, deadline - time.monotonic()))):
            slot = key.data
            if slot is None:
                self._listen()
            elif slot.key in self._slots and not slot.ended:
                if events & selectors.EVENT_WRITE:
                    self._write(slot)
                if events & selectors.EVENT_READ:
                    self._read(slot)
            if self._server is None:
                break
        now = time.monotonic()
        for slot in [each for each in self._slots.values() if each.deadline <= now]:
            self._lose(slot, "closed its connection" if slot.ended else f"gave no answer within {self._timeout:g} s")
        self._place()

    def _listen(self) -> None:
        """Act on the fork server's notices, and on its end."""
        assert self._server is not None
        try:
            notices = self._server.notices()
        except EOFError:
            self._lose_server()
            return
        for kind, key, value in notices:
            slot = self._slots.get(key)
            if slot is None:
                continue
            if kind == FORKED:
                slot.pid = value
                if not slot.outgoing:
                    slot.deadline = time.monotonic() + self._timeout
                continue
            if not slot.ended:
                self._read(slot)  # its last answer
            if key in self._slots:
                self._lose(slot, _ended(value) if kind == ENDED else f"cannot be forked: {os.strerror(value)}")

    def _read(self, slot: _Slot) -> None:
        """Take the answer that has come on a slot's connection, or its end."""
        while True:
            try:
                part = slot.connection.recv(2**18)
            except BlockingIOError:
                if slot.incoming:
                    slot.deadline = max(slot.deadline, time.monotonic() + _PROGRESS_TIMEOUT)
                return
            except ConnectionResetError:
                part = b""
            if not part:
                assert self._selector is not None
                self._selector.unregister(slot.connection)
                slot.ended, slot.deadline = True, time.monotonic() + _STATUS_TIMEOUT
                return
            try:
                slot.incoming.add(part)
                message = slot.incoming.take()
                if message is None and slot.call:
                    continue
                reply = _reply(message, slot.number, slot.call)
            except FrameError:
                reply = None
            if reply is None or slot.incoming:  # nothing may follow an answer
                self._lose(slot, "sent no proper answer")
            else:
                self._answered(slot, reply)
            return

    def _answered(self, slot: _Slot, reply: dict[str, Any]) -> None:
        method, slot.call, slot.deadline = slot.call, "", float("inf")
        failure = EnvironmentFailure(str(reply["error"]), str(reply["traceback"])) if "error" in reply else None
        if method == "release":
            if failure is not None:
                _log.warning("the environment of a released episode: %s\n%s", failure, failure.traceback)
            if reply["spent"]:
                self._remove(slot)
            else:
                self._idle.append(slot)
        elif slot.episode is None:  # released meanwhile
            self._close_environment(slot)
        else:
            slot.failed = failure is not None
            self._answers.append((slot.episode, failure or reply))

    # Ends

    def _lose(self, slot: _Slot, how: str) -> None:
        """Kill a slot and fail its episode."""
        if self._server is not None:
            self._server.kill(slot.key)
        self._remove(slot)
        if slot.episode is None:
            if slot.call:
                _log.warning("the environment of a released episode: %s %s", slot.label, how)
            return
        self._episodes[slot.episode] = None
        if slot.call:
            self._answers.append((slot.episode, EnvironmentFailure(f"{slot.label} {how}")))
        elif not slot.failed:
            self._lost[slot.episode] = how

    def _remove(self, slot: _Slot) -> None:
        assert self._selector is not None
        if not slot.ended:
            self._selector.unregister(slot.connection)
        slot.connection.close()
        del self._slots[slot.key]
        if slot in self._idle:
            self._idle.remove(slot)

    def _lose_server(self) -> None:
        """Fail all episodes that have a process; the next one starts the fork server anew."""
        server, self._server = self._server, None
        assert server is not None
        how = server.kill_all([slot.pid for slot in self._slots.values() if slot.pid])
        for slot in list(self._slots.values()):
            self._lose(slot, f"ended with the process that forked it, which {how}")
        self._forget_server()

    def _forget_server(self) -> None:
        if self._selector is not None:
            self._selector.close()
        if self._end is not None:
            self._end.detach()
        self._server = self._selector = self._end = None
        self._slots.clear()
        self._idle.clear()


def _ended(code: int) -> str:
    return "closed its connection" if code == LOST else how_it_ended(code)


def _reply(message: tuple[int, bytes] | None, number: int, method: str) -> dict[str, Any] | None:
    """Return the reply to call `number` of a method, of the right form; else None. Without a call none is right."""
    if not method or message is None or message[0] != number:
        return None
    try:
        reply = json.loads(message[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict):
        return None
    return reply if reply.keys() in ({"error", "traceback", "spent"}, _ANSWERS[method]) else None


def _end(slots: dict[int, _Slot], server: ForkServer, selector: selectors.BaseSelector) -> None:
    """End a pool's processes. In a forked copy of the owner this closes the copy's descriptors only."""
    for slot in slots.values():
        slot.connection.close()
    selector.close()
    server.close()
