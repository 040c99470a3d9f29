"""Detects calls without progress: each worker process watches its own call, and the controller ends a run that hangs.

A call makes progress while its Python position changes, or while the process or a child of it computes or uses the
disk. So neither a long compilation nor the loading of a large model looks like a hang, and a rank that waits for a
computing peer is not blamed. A thread that only runs Python code of one function makes no progress: it spins.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from ray.experimental import internal_kv  # the cluster's own store answers while a rank hangs; its actor does not

CPU_SHARE = 0.05
"""A process that computes less than this share of the time is idle but for Ray's own threads."""
SPINNING_LONGER = 4
"""How much longer a thread may run Python code of one function: it may also compute."""
SPIN_SAMPLES = 10
"""Times that a look asks for Python's lock, which a thread that spins gives up only when it has to."""
DISK_BYTES = 1 << 20
"""Bytes read and written between two looks above which the disk counts as busy."""
STARTS = ("__init__", "start")
"""Methods that may not hang; others may not while a peer waits for them in a collective."""
NO_FRAMES = ("torch/_ops.py", "contextlib.py")
"""Files whose frames do not show the reason of a wait."""

Place = Literal["collective", "data", "elsewhere"]
Position = tuple[tuple[str, str, int] | None, list[tuple[int, int]]]
"""A call, and the code and instruction of each of its frames, the innermost first."""


@dataclass(frozen=True)
class Stall:
    """A call without progress for `seconds`. `position` describes its position in words; `place` is the kind of it.

    `spins`: its thread computes, in Python code of one function.
    """

    role: str
    method: str
    seconds: float
    place: Place
    position: str
    spins: bool = False


def read_stall(key: str) -> Stall | None:
    """Return the last stall that the process of a key published; None if its call makes progress or it has no call."""
    text = internal_kv._internal_kv_get(key)
    return Stall(**json.loads(text)) if text else None


class ProgressWatch:
    """Watches the calls of this process from a thread of its own, and publishes those without progress under `key`.

    `seconds`: time after which a call counts as hung; it is published after half of that. 0: no watch.
    """

    def __init__(self, key: str, seconds: float) -> None:
        self._key, self._seconds = key, seconds
        self._interval = min(5.0, seconds / 6)
        self._call: tuple[str, str, int] | None = None
        self._thread: threading.Thread | None = None
        self._published = False

    @contextmanager
    def calling(self, role: str, method: str) -> Iterator[None]:
        """Watch the calling thread until the context ends."""
        if self._seconds and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="rlcore-progress", daemon=True)
            self._thread.start()
        self._call = role, method, threading.get_ident()
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        seen: Position = None, []
        began = looked = time.monotonic()
        used, own = usage(), time.thread_time()
        while True:
            time.sleep(self._interval)
            call, now = self._call, time.monotonic()
            frames = [] if call is None else frames_of(call[2])
            at: Position = call, [(id(frame.f_code), frame.f_lasti) for frame in frames]
            before, used = used, usage()
            looks, own = time.thread_time() - own, time.thread_time()
            # The end of a child process lowers the sums, which is progress too. These looks are none: among some
            # hundred threads one takes 10 ms.
            cpu, disk = abs(used[0] - before[0] - looks), abs(used[1] - before[1])
            busy = cpu > CPU_SHARE * (now - looked) or disk > DISK_BYTES
            spins = busy and _is_same_function(at, seen) and _python_is_busy()
            if call is None or (not spins and (busy or at != seen)):
                began = now
            looked, seen = now, at
            patience = self._seconds / 2 * (SPINNING_LONGER if spins else 1)
            if call is not None and now - began >= patience:
                stall = Stall(call[0], call[1], now - began, *position(frames), spins)
                internal_kv._internal_kv_put(self._key, json.dumps(asdict(stall)), overwrite=True)
                self._published = True
            elif self._published:
                internal_kv._internal_kv_del(self._key)
                self._published = False


def _is_same_function(at: Position, before: Position) -> bool:
    """Whether two looks found a call within one call of one function."""
    functions, outer = [code for code, _ in at[1]], at[1][1:]
    return (
        at[0] == before[0]
        and bool(functions)
        and functions == [code for code, _ in before[1]]
        and outer == before[1][1:]
    )


def _python_is_busy() -> bool:
    """Whether another thread runs Python code all the time, and no C code that computes beside it, as torch's does."""
    waits = []
    for _ in range(SPIN_SAMPLES):
        began = time.monotonic()
        time.sleep(1e-4)
        waits.append(time.monotonic() - began)
    # Such a thread gives up Python's lock after this interval, when another asks for it.
    return min(waits) > 0.8 * sys.getswitchinterval()


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a worker's method and of its callees, the innermost first."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.endswith(os.path.join("workers", "ray", "worker.py")):
        frames.append(frame)
        frame = frame.f_back
    return frames


def position(frames: Sequence[FrameType]) -> tuple[Place, str]:
    """Return the kind of a position and its description: the collective and its caller, or the innermost frame."""
    telling = [frame for frame in frames if not frame.f_code.co_filename.endswith(NO_FRAMES)]
    if not telling:
        return "elsewhere", "in a C function"
    if any(f"{os.sep}ray{os.sep}" in frame.f_code.co_filename for frame in telling):
        return "data", f"waiting for data in {_named(telling[0])}"
    if _is_collective(telling[0]):
        caller = next((f", called in {_named(frame)}" for frame in telling if not _is_collective(frame)), "")
        return "collective", f"in {telling[0].f_code.co_name}(){caller}"
    return "elsewhere", f"in {_named(telling[0])}"


def _is_collective(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return f"torch{os.sep}distributed{os.sep}" in file or frame.f_code.co_name == "init_process_group"


def _named(frame: FrameType) -> str:
    return f"{frame.f_code.co_name}() at {frame.f_code.co_filename}:{frame.f_lineno}"


def usage() -> tuple[float, int]:
    """Return the CPU seconds, and the bytes read from and written to disk, of this process and those it started.

    Of the others as far as the system tells.
    """
    cpu, disk, found = time.process_time(), _disk_bytes(os.getpid()), _children(os.getpid())
    while found:
        pid = found.pop()
        cpu, disk = cpu + _cpu_seconds(pid), disk + _disk_bytes(pid)
        found += _children(pid)
    return cpu, disk


def _cpu_seconds(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _disk_bytes(pid: int) -> int:
    counts = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    return int(counts.get("read_bytes", 0)) + int(counts.get("write_bytes", 0))


def _children(pid: int) -> list[int]:
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in _read(tasks).split()]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended, or the system does not tell
        return ""


def why_hung(names: Sequence[str], method: str, stalls: Sequence[Stall], ended: Sequence[int]) -> str:
    """Return the message of a hung call, with the ranks at fault first. `names` and `stalls`: of the ranks that run."""
    both = sorted(zip(stalls, names, strict=True), key=lambda pair: pair[0].place == "collective")
    lines = "; ".join(f"{name} is {stall.position}{', where it computes' * stall.spins}" for stall, name in both)
    seconds = min(stall.seconds for stall in stalls)
    left = f"; ranks {list(ended)} have ended the call" if ended else ""
    return (
        f"{method}() has made no progress for {seconds:.0f} s: {lines}{left}. If that is no hang, raise "
        "cluster.stall_timeout; 0 waits without end"
    )
