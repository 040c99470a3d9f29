"""What a side of the comparison does beside its work: it answers on stdin and stdout, and counts its bytes.

A side is a process of its own, with its own Ray, in its own venv. A line on stdin is a request such as
`{"do": "move", "consumers": 2}`; the answer is a line of JSON on what was stdout.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

LOGICAL_CPUS = 64
STORE_BYTES = 3 << 30
SAMPLE_SECONDS = 0.002


def start_ray(**environment: str) -> None:
    """Start a Ray of this side's own, whose workers use one thread each."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0", **environment}
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def serve(requests: Mapping[str, Callable[..., Any]]) -> None:
    """Say that this side is ready, and answer requests until stdin ends. What else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(requests[request.pop("do")](**request)) + "\n")
        answers.flush()


class Bytes:
    """Counts the bytes of all objects that this process pickles for Ray, or gets from it, from now on."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        worker = ray._private.worker.global_worker
        context = worker.get_serialization_context()
        serialize, deserialize = context.serialize, context.deserialize_objects

        def counted_serialize(value: Any) -> Any:
            made = serialize(value)
            self.sent += made.total_bytes
            return made

        def counted_deserialize(objects: Any, *others: Any) -> Any:
            self.received += sum(len(data) for data, *_ in objects if data is not None)
            return deserialize(objects, *others)

        context.serialize, context.deserialize_objects = counted_serialize, counted_deserialize

    def both(self) -> int:
        """Return all bytes so far."""
        return self.sent + self.received


class PrivateMemory:
    """Within `with`: watches this process's private memory; `grown` is by how many bytes its peak was above the start.

    Shared memory, as of Ray's object store, is not part of it.
    """

    def __enter__(self) -> PrivateMemory:
        self._peak = self._start = private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, private_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, private_bytes())

    @property
    def grown(self) -> int:
        """The growth at its peak."""
        return self._peak - self._start


def private_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon; this benchmark needs Linux 4.5 or later")


def measured(move: Callable[[], Mapping[str, Any]], passed: Bytes, watch: bool) -> dict[str, Any]:
    """Return what a move says, its seconds, and the bytes that passed through this process.

    With `watch` also by how much its memory grew; the watching slows it down.
    """
    before = passed.both()
    start = time.perf_counter()
    if watch:
        with PrivateMemory() as memory:
            said = move()
    else:
        said = move()
    seconds = time.perf_counter() - start
    answer = {**said, "seconds": seconds, "passed": passed.both() - before}
    return answer | ({"grown": memory.grown} if watch else {})


def forget_touches() -> None:
    """Have the system forget which pages this process has touched."""
    Path("/proc/self/clear_refs").write_text("1")


def touched_bytes() -> int:
    """Return how much of Ray's shared memory this process has touched since it was forgotten, in whole pages."""
    touched, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = "plasma" in line
        elif counts and line.startswith("Referenced:"):
            touched += int(line.split()[1]) * 1024
    return touched
