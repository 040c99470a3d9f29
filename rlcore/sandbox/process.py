"""The parent's side of a process that runs model-written code: start it, move its data, end all of it."""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rlcore.errors import SandboxError
from rlcore.processes.ends import signal_name
from rlcore.processes.frames import frame
from rlcore.sandbox.limits import Limits, Result
from rlcore.sandbox.plan import ENVIRONMENT, Plan, command_of, mount_point, python_files

_MOST_OUTPUT = 64  # times Limits.output_kb: who writes more is stopped
_GRACE = 5.0  # seconds for the process to end after it was told to
_PART = 2**16


class Process:
    """One process for model-written code, with all that it starts.

    `out` and `err` hold its output so far, up to `Limits.output_kb` each. Not for several threads at a time.
    """

    def __init__(
        self, plan: Plan, limits: Limits, files: Mapping[str, str | bytes], stdin: str = "", session: bool = False
    ) -> None:
        """Start it. With `session` it answers requests, else it runs the file main.py of `files`."""
        self._limits = limits
        self.out, self.err, self.status, self.replies = (bytearray() for _ in range(4))
        self.cut = self.overflowed = False
        self._written = 0
        self._ours: list[int] = []
        self._reads: dict[int, bytearray] = {}
        self._writes: dict[int, bytes] = {}
        self._folder = tempfile.mkdtemp(prefix="rlcore-sandbox-") if plan.mechanism == "limits" else None
        control, status = self._pipe(), self._pipe()
        inherited = [control[0], status[1]]
        self.requests = self._stdin = -1
        if session:
            requests, replies = self._pipe(), self._pipe()
            inherited += [requests[0], replies[1]]
            self.requests = requests[1]
            self._reads[replies[0]] = self.replies
        self._control = control[1]
        self._reads[status[0]] = self.status
        command = command_of(plan, limits, [*inherited, *([-1, -1] if not session else [])])
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if session else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=inherited,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._close_pipes()
            if self._folder is not None:
                _remove(self._folder)
            raise SandboxError(f"cannot start {command[0]}: {error}") from error
        for descriptor in inherited:
            self._close(descriptor)
        for pipe, buffer in ((self._process.stdout, self.out), (self._process.stderr, self.err)):
            assert pipe is not None
            self._reads[pipe.fileno()] = buffer
        self._send_job(plan, limits, files, session)
        if self._process.stdin is not None:
            self._stdin = self._process.stdin.fileno()
            self._put(self._stdin, stdin.encode(errors="surrogateescape"))

    def _pipe(self) -> tuple[int, int]:
        pair = os.pipe()
        self._ours += pair
        return pair

    def _close(self, descriptor: int) -> None:
        self._ours.remove(descriptor)
        os.close(descriptor)

    def _close_pipes(self) -> None:
        for descriptor in list(self._ours):
            self._close(descriptor)

    def _send_job(self, plan: Plan, limits: Limits, files: Mapping[str, str | bytes], session: bool) -> None:
        python = python_files()
        job: dict[str, Any] = {
            **asdict(plan),
            "read_only": python.read_only,
            "hidden": python.hidden,
            "mount_point": mount_point(python.read_only),
            "folder": self._folder or "/tmp",
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "cpu_seconds": int(limits.seconds * 60) if session else int(limits.seconds) + 1,
            "processes": limits.processes,
            "files": {
                name: text.encode(errors="surrogateescape") if isinstance(text, str) else text
                for name, text in files.items()
            },
            "environment": ENVIRONMENT,
        }
        self._put(self._control, frame(marshal.dumps(job)))

    def _put(self, descriptor: int, data: bytes) -> None:
        os.set_blocking(descriptor, False)
        self._writes[descriptor] = self._writes.get(descriptor, b"") + data

    def send(self, request: bytes) -> None:
        """Queue a request of a session; `pump` writes it."""
        self._put(self.requests, request)

    def pump(self, deadline: float, done: Callable[[], bool] | None = None) -> bool:
        """Move data until `done()`, or until all that runs has ended; False when `deadline` (monotonic) comes first.

        Also ends, as if at its end, when the output is far too long: `overflowed`.
        """
        poll = select.poll()
        for descriptor in self._reads:
            poll.register(descriptor, select.POLLIN)
        for descriptor in self._writes:
            poll.register(descriptor, select.POLLOUT)
        while self._reads and not self.overflowed and not (done is not None and done()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for descriptor, _ in poll.poll(1000 * left + 1):
                if descriptor in self._reads:
                    if not self._read(descriptor):
                        poll.unregister(descriptor)
                elif not self._write(descriptor):
                    poll.unregister(descriptor)
        return True

    def _read(self, descriptor: int) -> bool:
        """Take what a pipe holds; False at its end."""
        part = os.read(descriptor, _PART)
        if not part:
            del self._reads[descriptor]
            return False
        buffer = self._reads[descriptor]
        if buffer is self.out or buffer is self.err:
            most = self._limits.output_kb * 1024
            self._written += len(part)
            self.overflowed = self._written > _MOST_OUTPUT * most
            self.cut = self.cut or len(buffer) + len(part) > most
            part = part[: most - len(buffer)]
        elif len(buffer) + len(part) > 4 * _PART:  # no status or reply is that long
            self.overflowed = True
        buffer += part
        return True

    def _write(self, descriptor: int) -> bool:
        """Write what a pipe takes; False when nothing is left, or nobody reads it."""
        data = self._writes[descriptor]
        try:
            data = data[os.write(descriptor, data[:_PART]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # how the process ended says why
            data = b""
        self._writes[descriptor] = data
        if not data:
            del self._writes[descriptor]
            if descriptor == self._stdin and self._process.stdin is not None:
                self._process.stdin.close()
        return bool(data)

    def read_output(self) -> None:
        """Take the output that has been written by now."""
        while self.pump(time.monotonic() + 0.0005, lambda: not self._ready()) and self._ready():
            pass

    def _ready(self) -> bool:
        return bool(self._reads) and bool(select.select(list(self._reads), [], [], 0)[0]) and not self.overflowed

    def restart_output(self) -> None:
        """Begin to count and keep output anew."""
        self.out.clear()
        self.err.clear()
        self._written, self.cut = 0, False

    def end(self) -> None:
        """Kill all processes of it, wait for their end, take the last output, and remove its folder."""
        if self._control in self._ours:
            self._close(self._control)
        self._writes.clear()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:  # then its own end takes the others along
            self._process.kill()
            self._process.wait()
        overflowed, self.overflowed = self.overflowed, False
        self.pump(time.monotonic() + _GRACE)
        self.overflowed = self.overflowed or overflowed
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._close_pipes()
        self._reads.clear()
        if self._folder is not None:
            _remove(self._folder)

    def how_it_ended(self) -> tuple[int | None, str]:
        """Return the exit status, or None, and the cause in words; SandboxError when it was never set up."""
        text = bytes(self.status).decode(errors="replace")
        if text.startswith("!"):
            raise SandboxError(f"model-written code cannot be confined here: {text[2:].partition(chr(10))[0]}")
        if text.startswith("#"):
            return None, text[2:]
        if self.overflowed:
            return None, f"wrote more than {_MOST_OUTPUT * self._limits.output_kb} KiB"
        if not text:
            detail = bytes(self.err).decode(errors="replace").strip()[-500:]
            return None, f"ended without a status{': ' if detail else ''}{detail}"
        status = int(text)
        if status >= 0:
            return status, f"ended with status {status}"
        if -status == signal.SIGKILL:
            return status, "killed by SIGKILL (it may have used more memory than the machine has)"
        if -status == signal.SIGXCPU:
            return status, "used more CPU time than its limit"
        return status, f"killed by {signal_name(-status)}"

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _remove(folder: str) -> None:
    """Remove a folder whatever its rights say; all that could write to it has ended."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                with contextlib.suppress(PermissionError):  # another user's: only root gives those away, and may remove
                    os.chmod(path, 0o700)
    shutil.rmtree(folder)


def run_once(plan: Plan, code: str, stdin: str, limits: Limits, files: Mapping[str, str | bytes]) -> Result:
    """Run code as main.py, confined as `plan` says; SandboxError when the machine refuses a layer of it."""
    deadline = time.monotonic() + limits.seconds
    with Process(plan, limits, {**files, "main.py": code}, stdin) as process:
        in_time = process.pump(deadline)
    status, cause = process.how_it_ended() if in_time else (None, f"took longer than {limits.seconds:g} s")
    return Result(text_of(process.out), text_of(process.err), status, not in_time, process.cut, cause)


def text_of(data: bytearray) -> str:
    """Decode output; bytes that are not UTF-8 are replaced."""
    return data.decode(errors="replace")
