"""The process that forks environment processes: `python -m rlcore.episodes.child CONTROL_FD PARENT_PID MEMORY_MB`.

Standard input is the parent's pickle of (modules to import, cloudpickle of (class or functions, config)). The process
loads it once, calls the class's `prepare_process()` if there is one, and answers on the control socket with one frame:
{} or {"error": ..., "traceback": ...}. Then each command on that socket is COMMAND: FORK with a slot's number and one
end of its own socket pair, or KILL with its number. Each notice is NOTICE: FORKED with the slot's number and process
id, REFUSED with an errno, or ENDED with the slot's exit code (a signal is negative).

A slot's process reads requests, frames of the parent's pickle of (method, arguments), and answers each with a frame of
JSON, with the request's number: the parent never unpickles bytes from a process that ran a model's calls.

Nothing is left running: a slot's process collects what its episodes start (it is their subreaper), and is killed with
it. When the parent ends, however it ends, this process ends the slots.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any, BinaryIO, NoReturn

from rlcore.episodes.environment import EnvironmentFailure, EpisodeEnvironment, as_class, describe
from rlcore.processes.child import (
    adopt_orphans,
    die_with_parent,
    forbid_core_files,
    limit_memory,
    outlive_parent,
)
from rlcore.processes.ends import kill_group
from rlcore.processes.frames import frame, read_frame
from rlcore.stacks import register_stacks

COMMAND = struct.Struct("!cQ")
NOTICE = struct.Struct("!cQq")
FORK, KILL = b"+", b"-"
FORKED, REFUSED, ENDED = b"f", b"r", b"e"
MOST_REPLY = 2**26  # bytes
LOST = 83  # exit code of a slot that cannot write to its socket
GRACE = 2.0  # seconds for `close()` of environments when the parent has ended
PATIENCE = 5.0  # seconds to kill everything at the end


def main() -> None:
    """Load the environment, then serve the parent until it ends."""
    control, parent, memory_mb = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    control.set_inheritable(False)
    imports, data = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # output of environments must not look like a program's result
    die_with_parent(parent)  # while the user's module runs, nobody watches the parent
    adopt_orphans()
    register_stacks()
    reply: dict[str, Any] = {}
    try:
        environment = _load(imports, data)
        _check_room(memory_mb)
    except BaseException as error:  # SystemExit too
        text, trace = describe(error)
        reply = {"error": text, "traceback": trace}
    # From here on this process watches the parent, and ends more than itself. Before the reply: the signal comes also
    # at the end of the parent's thread that started this process.
    outlive_parent()
    control.sendall(frame(json.dumps(reply).encode()))
    if not reply:
        _ForkServer(control, parent, memory_mb, environment).serve()


def _load(imports: tuple[str, ...], data: bytes) -> tuple[type, Any]:
    for module in imports:
        importlib.import_module(module)
    if b"numpy" in data:  # imported within a function, it would be imported after an episode was seeded
        importlib.import_module("numpy")
    target, config = pickle.loads(data)
    target = as_class(target)
    if hasattr(target, "prepare_process"):
        target.prepare_process()
    return target, config


def _check_room(memory_mb: int) -> None:
    if memory_mb and sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize() // 2**20
        if mapped >= memory_mb:
            raise MemoryError(f"it maps {mapped} MiB when loaded, and its limit is {memory_mb} MiB (env.memory_mb)")


class _ForkServer:
    """Forks, kills and reaps the slots' processes, and what they left running."""

    def __init__(self, control: socket.socket, parent: int, memory_mb: int, environment: tuple[type, Any]) -> None:
        self._control, self._parent, self._memory_mb, self._environment = control, parent, memory_mb, environment
        self._slots: dict[int, int] = {}  # process id -> slot
        self._own = frozenset(_children())  # started by the user's module
        self._woken, self._wake = os.pipe()
        self._stop = False

    def serve(self) -> None:
        """Serve until the parent ends or closes the control socket."""
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminated)
        gc.collect()
        gc.freeze()  # a collection in a slot would copy the pages of all these objects
        events = select.poll()
        events.register(self._control, select.POLLIN)
        events.register(self._woken, select.POLLIN)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not self._stop and os.getppid() == self._parent:
                for descriptor, _ in events.poll(500):
                    if descriptor == self._woken:
                        os.read(self._woken, 4096)
                    elif not self._obey():
                        self._stop = True
                self._reap()
        self._end()

    def _terminated(self, *_: Any) -> None:
        self._stop = True

    def _obey(self) -> bool:
        """Read and run one command; False at the end of the stream."""
        data, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return False
        kind, slot = COMMAND.unpack(data)
        if kind == FORK:
            self._fork(slot, descriptors[0])
        else:
            for pid in [pid for pid, each in self._slots.items() if each == slot]:
                _kill(pid)
        return True

    def _fork(self, slot: int, descriptor: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(REFUSED, slot, error.errno or 0)
        else:
            if pid == 0:
                self._become_slot(descriptor)
            self._slots[pid] = slot
            self._tell(FORKED, slot, pid)
        os.close(descriptor)

    def _become_slot(self, descriptor: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            os.close(self._woken)
            os.close(self._wake)
            server = os.getppid()
            os.setsid()
            die_with_parent(server)
            adopt_orphans()
            register_stacks()
            forbid_core_files()
            limit_memory(self._memory_mb)
            _SlotProcess(socket.socket(fileno=descriptor), *self._environment).serve()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)

    def _tell(self, kind: bytes, slot: int, value: int) -> None:
        if not self._stop:
            self._control.sendall(NOTICE.pack(kind, slot, value))

    def _reap(self) -> None:
        """Collect ended processes; kill what an ended slot left running, which is now this process's child."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            ended = True
            if pid in self._slots:
                kill_group(pid)
                self._tell(ENDED, self._slots.pop(pid), os.waitstatus_to_exitcode(status))
        if ended:
            for pid in _children():
                if pid not in self._slots and pid not in self._own:
                    _kill(pid)

    def _end(self) -> None:
        """End the slots: by the end of their sockets within GRACE seconds, so that environments close; else by force.

        Returns when this process has no child any more, at the latest after PATIENCE seconds more.
        """
        self._stop, self._own = True, frozenset()
        patience = time.monotonic() + GRACE
        while self._slots and time.monotonic() < patience:
            select.select([self._woken], [], [], 0.05)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
        patience = time.monotonic() + PATIENCE
        while time.monotonic() < patience:
            for pid in {*self._slots, *_children()}:
                _kill(pid)
            self._slots = {}
            if _reap_children():
                return
            time.sleep(0.002)


def _reap_children() -> bool:
    """Reap the children that have ended; whether no child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _children() -> list[int]:
    """Return the process ids of this process's children."""
    if sys.platform != "linux":
        return []
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # it may end meanwhile
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _kill(pid: int) -> None:
    """Kill a child of this process that has not been reaped, and its process group if it leads one."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class _SlotProcess:
    """One environment process: episodes one after the other, a new environment object each."""

    def __init__(self, connection: socket.socket, target: type, config: Any) -> None:
        self._connection, self._target, self._config = connection, target, config
        self._requests: BinaryIO = connection.makefile("rb")
        self._environment: EpisodeEnvironment | None = None
        self._spent = False  # out of memory once: to be replaced after the episode
        self._fresh = _process_state()

    def serve(self) -> None:
        """Answer requests until the parent closes the connection, or until an episode left something running."""
        try:
            while (request := read_frame(self._requests)) is not None:
                number, body = request
                answer, spent = self._reply(body)
                self._connection.sendall(frame(answer, number))
                if spent:
                    return
        except (BrokenPipeError, ConnectionResetError):  # the parent has ended
            pass
        except OSError:  # the environment closed the descriptor
            os._exit(LOST)
        if self._environment is not None:
            self._environment.close()

    def _reply(self, request: bytes) -> tuple[bytes, bool]:
        """Return the reply's body, and whether this process ends after it."""
        reply: dict[str, Any] = {}
        method, spent = "request", False
        try:
            method, arguments = pickle.loads(request)
            if method == "release":
                spent = True
                self._release()
                spent = reply["spent"] = self._spent or _process_state() != self._fresh
            else:
                if method == "reset":
                    self._environment = EpisodeEnvironment(self._target, self._config)
                reply = getattr(self._environment, method)(*arguments)
            body = json.dumps(reply).encode()
            if len(body) > MOST_REPLY:
                raise EnvironmentFailure(f"the answer to {method} has {len(body)} bytes; the most are {MOST_REPLY}")
        except EnvironmentFailure as failure:
            self._spent = self._spent or isinstance(failure.__cause__, MemoryError)
            reply = {"error": failure.cause, "traceback": failure.traceback}
        except BaseException as error:
            self._spent = self._spent or isinstance(error, MemoryError)
            text, trace = describe(error)
            reply = {"error": f"{method} cannot be answered: {text}", "traceback": trace}
        else:
            return body, spent
        return json.dumps({**reply, "spent": spent}).encode(), spent

    def _release(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()


def _process_state() -> tuple[Any, ...]:
    """Return what an episode must leave as it was: no child processes, its threads, variables and directory."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""
    return _reap_children(), threading.active_count(), dict(os.environ), folder


if __name__ == "__main__":
    main()
