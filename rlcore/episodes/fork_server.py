"""The parent's side of the process that forks environment processes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence

from rlcore.episodes.child import COMMAND, FORK, GRACE, KILL, MOST_REPLY, NOTICE, PATIENCE
from rlcore.episodes.packing import PackedEnvironment
from rlcore.errors import ConfigError
from rlcore.processes.ends import how_it_ended, kill_group
from rlcore.processes.frames import FrameBuffer, FrameError
from rlcore.processes.pipe import Pipe
from rlcore.sandbox.variables import python_variables

_START_TIMEOUT = 120.0  # seconds to start Python and load the environment


class ForkServer:
    """A process that has loaded an environment and forks slots, which have numbers. See rlcore.episodes.child."""

    def __init__(self, environment: PackedEnvironment, memory_mb: int, keep_env: Sequence[str]) -> None:
        """Start the process and wait until it has loaded; ConfigError with its traceback if it cannot."""
        self.control, other = socket.socketpair()
        self._commands: deque[tuple[bytes, socket.socket | None]] = deque()
        self._notices = b""
        with other, tempfile.TemporaryFile() as request:
            pickle.dump((environment.imports, environment.data), request)
            request.seek(0)
            command = [sys.executable, "-Pu", "-m", "rlcore.episodes.child"]
            self._process = subprocess.Popen(
                # -P: the working directory must not shadow modules; -u: a slot's output is not lost when it ends.
                [*command, str(other.fileno()), str(os.getpid()), str(memory_mb)],
                stdin=request,
                pass_fds=[other.fileno()],
                start_new_session=True,
                env=python_variables(keep_env),
            )
        try:
            reply = self._loaded()
        except BaseException:
            self.kill_all(())
            raise
        if reply:
            self.close()
            raise ConfigError(
                f"environment {environment.name!r} cannot be loaded in its own process: {reply['error']}\n"
                f"{reply['traceback']}"
            )
        self.control.setblocking(False)

    def fork(self, slot: int) -> socket.socket:
        """Have a slot forked, and return this side's end of its connection."""
        own, other = socket.socketpair()
        own.setblocking(False)
        self._command(FORK, slot, other)
        return own

    def kill(self, slot: int) -> None:
        """Have a slot killed with everything that it started, if it runs."""
        self._command(KILL, slot, None)

    def flush(self) -> bool:
        """Send commands that have not been sent; False if some are left."""
        while self._commands:
            data, end = self._commands[0]
            try:
                if end is None:
                    self.control.send(data)
                else:
                    socket.send_fds(self.control, [data], [end.fileno()])
            except BlockingIOError:
                return False
            except BrokenPipeError:  # reading the notices says so
                pass
            if end is not None:
                end.close()
            self._commands.popleft()
        return True

    def notices(self) -> list[tuple[bytes, int, int]]:
        """Return the notices that have come, (kind, slot, value). EOFError when the process has ended."""
        with contextlib.suppress(BlockingIOError):
            try:
                part = self.control.recv(2**16)
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            self._notices += part
        whole = len(self._notices) // NOTICE.size * NOTICE.size
        notices = list(NOTICE.iter_unpack(self._notices[:whole]))
        self._notices = self._notices[whole:]
        return notices

    def close(self) -> None:
        """End the process and the slots. Slots whose connections are closed have GRACE seconds to end by themselves."""
        self._drop()
        try:
            self._process.wait(GRACE + PATIENCE + 1)
        except subprocess.TimeoutExpired:
            self.kill_all(())

    def kill_all(self, slots: Sequence[int]) -> str:
        """Kill the process and the process groups of slots (process ids), and return how it ended."""
        self._drop()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to end
            self._process.wait(0.5)
        for pid in [self._process.pid, *slots]:
            kill_group(pid)
        return how_it_ended(self._process.wait())

    def _drop(self) -> None:
        for _, end in self._commands:
            if end is not None:
                end.close()
        self._commands.clear()
        self.control.close()

    def _command(self, kind: bytes, slot: int, end: socket.socket | None) -> None:
        self._commands.append((COMMAND.pack(kind, slot), end))
        self.flush()

    def _loaded(self) -> dict[str, str]:
        """Read the answer to the environment's loading: {} or {"error", "traceback"}."""
        control, deadline = self.control.fileno(), time.monotonic() + _START_TIMEOUT
        try:
            _, body = Pipe(self._process, control, control, FrameBuffer(MOST_REPLY), deadline).receive()
            reply: dict[str, str] = json.loads(body)
            return reply
        except (FrameError, ValueError):  # ValueError: not JSON
            raise ConfigError("the environment wrote to its own connection while it was loaded") from None
        except TimeoutError:
            raise ConfigError(f"the environment was not loaded within {_START_TIMEOUT:g} s") from None
        except EOFError:
            raise ConfigError(f"the environment {how_it_ended(self._process.wait())} while it was loaded") from None
