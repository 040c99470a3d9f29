"""The parent's side of a connection to a process, with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time

from rlcore.processes.frames import FrameBuffer, frame

_POLL = 0.2  # seconds between checks that the process lives: a grandchild may hold its end of the pipe open


class Pipe:
    """Sends frames to a process and receives its frames, until a deadline (TimeoutError) or its end (EOFError)."""

    def __init__(
        self, process: subprocess.Popen[bytes], to: int, from_: int, received: FrameBuffer, deadline: float
    ) -> None:
        """`to` and `from_` are descriptors; `received` holds what has come before; `deadline` is monotonic seconds."""
        self._process, self._to, self._from, self._received, self._deadline = process, to, from_, received, deadline
        os.set_blocking(to, False)
        os.set_blocking(from_, False)

    def send(self, body: bytes, number: int = 0) -> None:
        """Write a frame. If the process has closed its end, the rest is dropped: receiving says why.

        Raises FrameError for too many bytes that the process sends meanwhile.
        """
        rest = memoryview(frame(body, number))
        with contextlib.suppress(BrokenPipeError):
            while rest:
                # Read as well: a process blocked on writing its answers reads no more requests.
                if self._wait((self._to, select.POLLOUT), (self._from, select.POLLIN)) == self._from:
                    self._read()
                else:
                    with contextlib.suppress(BlockingIOError):
                        rest = rest[os.write(self._to, rest) :]

    def receive(self) -> tuple[int, bytes]:
        """Return the number and the body of the next frame. Raises FrameError for too long a body."""
        while (message := self._received.take()) is None:
            self._wait((self._from, select.POLLIN))
            self._read()
        return message

    def _read(self) -> None:
        try:
            part = os.read(self._from, 2**16)
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        self._received.add(part)

    def _wait(self, *events: tuple[int, int]) -> int:
        """Return the first descriptor that is ready (or broken)."""
        poll = select.poll()
        for descriptor, event in events:
            poll.register(descriptor, event)
        while not (ready := poll.poll(1000 * max(0.0, min(_POLL, self._deadline - time.monotonic())))):
            if self._process.poll() is not None:
                raise EOFError
            if time.monotonic() >= self._deadline:
                raise TimeoutError
        return ready[0][0]
