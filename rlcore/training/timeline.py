"""The timeline of a run: each role's calls, as metrics of each step and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcore.workers import Span

BOOKKEEPING = ("seconds", "_read_mesh")
"""Methods that only report on the workers; the timeline leaves them out."""
CONTROLLER = 0
"""The controller's process number in the trace; its spans are the steps."""


def timeline_metrics(spans: Sequence[Span], start: float) -> dict[str, float]:
    """Return each method's first start and last end, in seconds from `start`, and the overlap of the roles.

    timeline/ROLE.METHOD/began and /ended; timeline/busy: seconds in which at least one process worked;
    timeline/overlap: the share of these seconds in which processes of two or more roles worked.
    """
    spans = [span for span in spans if span.method not in BOOKKEEPING and span.ended > start]
    metrics: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.began):
        name = f"timeline/{span.role}.{span.method}"
        metrics.setdefault(f"{name}/began", span.began - start)
        metrics[f"{name}/ended"] = max(metrics.get(f"{name}/ended", 0.0), span.ended - start)
    busy = both = 0.0
    edges: list[tuple[float, int, str]] = []
    for span in spans:
        edges += [(span.began, 1, span.role), (span.ended, -1, span.role)]
    at_work: dict[str, int] = {}
    before = start
    for moment, change, role in sorted(edges):
        roles = sum(1 for count in at_work.values() if count)
        busy += (moment - before) * (roles > 0)
        both += (moment - before) * (roles > 1)
        at_work[role] = at_work.get(role, 0) + change
        before = moment
    if spans:
        metrics["timeline/busy"] = busy
        metrics["timeline/overlap"] = both / busy if busy > 0 else 0.0
    return metrics


class Trace:
    """A file of Chrome's trace events in array form, which may lack its last bracket: a killed run's file opens too.

    Each worker process is a track. A span shows a call, and a paler span before it the wait for the call's inputs. A
    resumed run appends to the same file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: set[int] = set()
        if not path.exists():
            path.write_text("[\n", encoding="utf-8")

    def add(self, step: int, start: float, end: float, spans: Sequence[Span]) -> None:
        """Append one step, with the controller's start and end times, and the workers' spans in it."""
        events = [*self._events(step, start, end, spans)]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + ",\n" for event in events)

    def _events(self, step: int, start: float, end: float, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
        if not self._named:
            self._named.add(CONTROLLER)
            yield _name(CONTROLLER, "controller")
        yield _event(CONTROLLER, step % 2, f"step {step}", "step", start, end)  # events of one line may not overlap
        for span in (span for span in spans if span.method not in BOOKKEEPING):
            process = zlib.crc32(f"{span.host}:{span.pid}".encode())  # two nodes may have the same pid
            if process not in self._named:
                self._named.add(process)
                yield _name(process, f"{span.role} rank {span.rank} ({span.pid} on {span.host})")
            if span.began - span.arrived > 1e-4:
                yield _event(process, span.rank, "waits for input", "wait", span.arrived, span.began)
            yield _event(process, span.rank, f"{span.role}.{span.method}", span.role, span.began, span.ended)


def _event(process: int, line: int, name: str, kind: str, start: float, end: float) -> dict[str, Any]:
    times = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": line, **times}


def _name(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
