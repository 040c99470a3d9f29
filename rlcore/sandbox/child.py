"""The process in which model-written code runs: `import child; child.main()` in a Python without rlcore.

Its arguments CONTROL, STATUS, REQUESTS and REPLIES are file descriptors; the last two are -1 for a single run. From
CONTROL it reads a frame (`rlcore.processes.frames`) with a marshalled dict, written by `rlcore.sandbox.process`; when
CONTROL closes, all ends. Standard input, output and error are those of the code. It confines itself as the dict says,
forks the process that runs the code, waits for its end, kills what is left, and writes to STATUS the exit status as
text (negative: a signal), or "! CAUSE" when it could not be set up, or "# CAUSE" when it stopped the code itself.

A session answers each request with a line of JSON on REPLIES, {"id", "error"}: `error` is "" or "TypeName: message". A
request is an id of 32 characters, the code's length in bytes as 16 hexadecimal digits, and the code. A line with an
empty id comes first, when the session is ready.
"""

from __future__ import annotations

import builtins
import marshal
import os
import select
import struct
import sys
import time
from types import FrameType, ModuleType, TracebackType

TYPE_CHECKING = False  # typing would cost each run more than all other imports together
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from rlcore.sandbox import confine
else:
    import confine

    del sys.path[0], sys.modules["confine"]

_FAILED = 70
_LOOK_EVERY = 0.02  # seconds between two looks at the processes, where nothing else counts them


def main() -> None:
    """Read the job and play this process's part in it; return only in the process that runs the code."""
    control, status, requests, replies = map(int, sys.argv[1:])
    job = _read_job(control)
    try:
        if job["mechanism"] == "namespaces":
            _start_in_namespaces(job, control, status)
        else:
            _start_here(job, control, status)
        os.close(control)
        _prepare(job)
    except OSError as error:
        _write(status, f"! {error}\n")
        os._exit(_FAILED)
    os.close(status)
    if requests >= 0:
        _Session(requests, replies).serve()
    else:
        _run_file("main.py")


def _read_job(control: int) -> dict[str, Any]:
    _, length = struct.unpack("!QQ", _read_exactly(control, 16))
    return marshal.loads(_read_exactly(control, length))


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            os._exit(0)  # the caller has gone
        data += part
    return data


def _write(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode(errors="replace")[:2000])


# Three ways to be confined; each returns in the process that runs the code


def _start_in_namespaces(job: dict[str, Any], control: int, status: int) -> None:
    """Fork the first process of new namespaces, whose end kills all others in them, and from it the one for the code.

    This process itself stays outside and only waits for the first one.
    """
    uid = confine.own_uid() if job["own_user"] else confine.NOBODY
    confine.enter_namespaces(with_user=not job["own_user"])
    first = os.fork()
    if first:
        os.close(control)
        os.close(status)
        os.waitpid(first, 0)
        os._exit(0)
    confine.enter_root(job["mount_point"], job["read_only"], job["hidden"], job["file_mb"], uid)
    job["folder"] = "/tmp"
    if job["own_user"]:
        confine.become(uid)
    confine.drop_rights()
    confine.set_dumpable(False)
    confine.die_with_parent()
    confine.limit(job["memory_mb"], job["file_mb"], job["cpu_seconds"], job["processes"] + 1)
    code = os.fork()
    if code:
        _supervise(code, control, status)
        os._exit(0)  # the kernel kills the rest
    confine.set_dumpable(True)


def _start_here(job: dict[str, Any], control: int, status: int) -> None:
    """Fork the process for the code; this one kills by itself what that one leaves, as nothing else does or at once.

    bwrap's own process ends before those in its namespaces have.
    """
    linux, bwrap = sys.platform == "linux", job["mechanism"] == "bwrap"
    uid = confine.own_uid() if job["own_user"] else None
    watched = linux and not bwrap and uid is None  # RLIMIT_NPROC would count all processes of this user
    if linux:
        confine.adopt_orphans()
    if uid is not None:
        confine.give(job["folder"], uid)
    code = os.fork()
    if code:
        try:
            _supervise(code, control, status, job["processes"] if watched else None)
        finally:
            if linux:
                _kill_descendants(uid, all_that_is=bwrap)
            else:
                _kill_group(code)
        os._exit(0)
    if uid is not None:
        confine.become(uid)
    if linux:
        confine.drop_rights()
        confine.die_with_parent()
    processes = job["processes"] + (2 if bwrap else 0)  # bwrap's own, and this one's parent
    confine.limit(
        job["memory_mb"], job["file_mb"], job["cpu_seconds"], None if uid is None and not bwrap else processes
    )


def _prepare(job: dict[str, Any]) -> None:
    """Take the last steps in the process that runs the code, which then has nothing of the host left."""
    os.setsid()
    os.umask(0o077)
    folder = job["folder"]
    os.chdir(folder)
    for name, content in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    if job["landlock"]:
        confine.restrict_files(job["read_only"], [folder])
    if job["seccomp"]:
        confine.filter_calls(only_own_signals=job["mechanism"] == "limits" and not job["own_user"])
    os.environ.clear()
    os.environ.update(job["environment"], HOME=folder, TMPDIR=folder, PWD=folder)
    del sys.modules[__name__]
    sys.argv = ["main.py"]
    sys.path.insert(0, folder)


# The process that waits


def _supervise(code: int, control: int, status: int, most: int | None = None) -> None:
    """Wait until the process for the code ends, the caller closes CONTROL, or there are more than `most` processes.

    Reaps orphans meanwhile. The ends of the code's pipes that this process has are closed first.
    """
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    wait = 0.2
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(code), select.POLLIN)
    else:
        wait = 0.005
    while True:
        for descriptor, _ in poll.poll(1000 * (wait if most is None else min(wait, _LOOK_EVERY))):
            if descriptor == control:
                return
        while True:
            pid, how = _reap()
            if pid == code:
                _write(status, str(os.waitstatus_to_exitcode(how)))
                return
            if not pid:
                break
        if most is not None and len(_descendants()) > most:
            _write(status, f"# more than {most} processes")
            return


def _reap() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _descendants() -> list[int]:
    """Return all processes below this one."""
    own = os.getpid()
    quick = os.path.exists(f"/proc/{own}/task/{own}/children")  # not in every kernel
    parents = {} if quick else _all_children()
    found = _children(own) if quick else parents.get(own, [])
    for pid in found:  # grows while it is read
        found.extend(_children(pid) if quick else parents.get(pid, []))
    return found


def _children(parent: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        pass
    return found


def _all_children() -> dict[int, list[int]]:
    """Return the children of each process of this machine."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            children.setdefault(parent, []).append(int(name))
    return children


def _kill_descendants(uid: int | None, all_that_is: bool) -> None:
    """Kill all processes below this one until none is left. Orphans have become this process's own children.

    `uid` is the user that they, and they only, have. `all_that_is`: no other process can be seen from here.
    """
    while True:
        if all_that_is:
            if os.getpid() > 9:  # bwrap's command is the second process of its namespace
                raise OSError("bwrap: it made no process namespace, so its processes cannot be told from others")
            try:
                os.kill(-1, 9)
            except ProcessLookupError:
                return
        elif uid is not None:
            _kill_user(uid)
        else:
            for number in (19, 9):  # stopped first, so that none of them forks while the others are killed
                for pid in _descendants():
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:  # it ended meanwhile
                        continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill_user(uid: int) -> None:
    """Kill all processes of a user in one call, which none of them can outrun."""
    killer = os.fork()
    if not killer:
        try:
            confine.become(uid)
            os.kill(-1, 9)
        except ProcessLookupError:  # none is left
            pass
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _kill_group(code: int) -> None:
    try:  # noqa: SIM105 - contextlib would cost each run its import
        os.killpg(code, 9)
    except (ProcessLookupError, PermissionError):  # it has ended; in macOS's words the second
        pass


# The process that runs the code


def _run_file(name: str) -> None:
    """Run a file of the current folder as `python NAME` does, with the exit status of the exception that ends it."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__.update(__file__=name, __builtins__=builtins)
    with open(name, "rb") as file:
        source = file.read()
    try:
        exec(compile(source, name, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _below_this_file(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _below_this_file(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename == __file__


class _Session:
    """Executes code in one module, request by request.

    It calls nothing that code could replace in a module between a request and the reply, but to describe an exception:
    code that patches builtins, json or os changes its own results only.
    """

    def __init__(self, requests: int, replies: int) -> None:
        import _ast
        import linecache
        import traceback
        from json.encoder import encode_basestring_ascii

        self._ast, self._lines, self._format, self._quote = _ast, linecache, traceback, encode_basestring_ascii
        self._read, self._write, self._getpid = os.read, os.write, os.getpid
        self._compile, self._exec = compile, exec
        self._from, self._to = requests, replies
        self._pid, self._out, self._count = os.getpid(), sys.stdout, 0
        module = sys.modules["__main__"] = ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        self._names = module.__dict__

    def serve(self) -> NoReturn:
        """Answer requests until the pipe closes."""
        token = ""
        while True:
            self._reply(token, self._execute(self._take(int(self._take(16), 16))) if token else "")
            token = self._take(32).decode()

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._read(self._from, size - len(data))
            if not part:
                os._exit(0)
            data += part
        return data

    def _execute(self, code: bytes) -> str:
        self._count += 1
        name = f"<input {self._count}>"
        error = ""
        try:
            text = code.decode()
            self._lines.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            tree: Any = self._compile(text, name, "exec", self._ast.PyCF_ONLY_AST)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], self._ast.Expr) else None
            self._exec(self._compile(tree, name, "exec"), self._names)
            if last is not None:  # "single" shows the value
                self._exec(self._compile(self._ast.Interactive([last]), name, "single"), self._names)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"[:2000]
            raised.__traceback__ = _below_this_file(raised.__traceback__)
            sys.stderr.write("".join(self._format.format_exception(raised)))
        if self._getpid() != self._pid:  # the code forked, and this is the copy
            sys.stdout.flush()
            os._exit(0)
        for stream in (self._out, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        return error

    def _reply(self, token: str, error: str) -> None:
        data = f'{{"id": "{token}", "error": {self._quote(error)}}}\n'.encode()
        while data:
            data = data[self._write(self._to, data) :]
