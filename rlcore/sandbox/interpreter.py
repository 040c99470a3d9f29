"""A Python session in an isolated process, which keeps its state from one piece of code to the next."""

from __future__ import annotations

import json
import secrets
import time
from types import TracebackType
from typing import Any

from rlcore.errors import SandboxError
from rlcore.sandbox.isolation import Isolation, isolation
from rlcore.sandbox.limits import Limits, Result
from rlcore.sandbox.process import Process, text_of

_START = 30.0  # seconds until a new process answers


class Interpreter:
    """A Python session like an interactive interpreter's. One thread at a time may use it. Close it, or use `with`.

    The process starts at the first `execute`. When code ends it, or takes too long, its state is lost, and the next
    `execute` starts a new one.
    """

    def __init__(self, limits: Limits | None = None, within: Isolation | None = None) -> None:
        """`within` is the isolation to use, by default the best of this machine; `Limits()` by default."""
        self.limits = limits or Limits()
        self._plan = (within or isolation()).plan
        self._process: Process | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a process that holds state."""
        return self._process is not None

    def execute(self, code: str) -> Result:
        """Run code in the session; the value of a last line that is an expression is shown, unless it is None.

        `Result.status` is 0, or 1 when the code raised an exception, whose traceback is in `stderr`. It is None when
        the process was stopped or ended by itself, with any status; `cause` says how, and that the state is lost.
        Output that threads or processes of earlier code have written since belongs to this result.

        Raises SandboxError when a process cannot be set up.
        """
        process = self._process = self._process or self._start()
        process.restart_output()
        token = secrets.token_hex(16)
        text = code.encode(errors="replace")
        process.send(f"{token}{len(text):016x}".encode() + text)
        in_time = process.pump(time.monotonic() + self.limits.seconds, lambda: b"\n" in process.replies)
        error = _take_reply(process, token)
        if error is None:
            return self._lost(process, in_time)
        process.read_output()
        cause = f"raised {error}" if error else "finished"
        return Result(text_of(process.out), text_of(process.err), int(bool(error)), False, process.cut, cause)

    def restart(self) -> None:
        """Drop the session's state."""
        self.close()

    def close(self) -> None:
        """End the process and all that it started. `execute` would start a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _start(self) -> Process:
        process = Process(self._plan, self.limits, {}, session=True)
        process.pump(time.monotonic() + _START, lambda: b"\n" in process.replies)
        if _take_reply(process, "") is None:
            process.end()
            _, cause = process.how_it_ended()
            raise SandboxError(f"a session for model-written code did not start: {cause}")
        return process

    def _lost(self, process: Process, in_time: bool) -> Result:
        """Say why there was no reply. A process that has not ended yet is killed.

        Its status is none of the code's: an exit in the middle of the code with status 0 is no end of the code.
        """
        self.close()
        how = process.how_it_ended()[1] if in_time else f"took longer than {self.limits.seconds:g} s"
        cause = f"{how}; the session's state is lost"
        return Result(text_of(process.out), text_of(process.err), None, not in_time, process.cut, cause)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take_reply(process: Process, token: str) -> str | None:
    """Take the reply to a request and return its error, "" for none; None when there is no proper one.

    Only a process that read the request knows its token, so code cannot answer the requests that follow it.
    """
    line, found, _ = bytes(process.replies).partition(b"\n")
    process.replies.clear()
    if not found:
        return None
    try:
        reply: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(reply, dict) or reply.get("id") != token or not isinstance(reply.get("error"), str):
        return None
    return reply["error"]
