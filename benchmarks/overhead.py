"""What a step spends on anything but decoding, forward, backward and optimizer."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.against_trl import TWO_THREADS, Run, Side, alternate, long_tails
from benchmarks.report import GRPO, Benchmark, Figure, at_most

WORKS = ("time/actor_generate", "time/actor_log_probs", "time/actor_update")
"""Seconds that the workers' engines spend; the rest of a step is overhead."""
SIDES = (
    Side("in process, two threads", 2, TWO_THREADS),
    Side("Ray, one worker, two threads", 2, ("cluster=local", "cluster.workers=1", "cluster.cpus_per_worker=2")),
)
OVERHEAD = {side.name: at_most(f"{side.name}: overhead, share of a step", 0.05) for side in SIDES}
BENCHMARK = Benchmark(
    "overhead",
    measures=(*GRPO, "benchmarks/overhead.py", "benchmarks/against_trl/__init__.py", "benchmarks/models.py"),
    bars=tuple(OVERHEAD.values()),
)
NOTES = """\
The long-tail workload (see long_tail), fp32, GRPO without a reference, one worker. Overhead: what is left of a step's
seconds, on the controller's clock, without those in which the worker's engines decode and go forward, backward and
through the optimizer (time/actor_generate, _log_probs, _update): the controller, dispatch, serialisation, rewards, the
switch of the weights, metrics and files. Cutting micro-batches and stacking samples happen inside the engines and are
not overhead here. There is no other side."""


def overhead(row: Mapping[str, float]) -> float:
    """Return the share of a step that is not work."""
    return 1 - sum(row.get(name, 0.0) for name in WORKS) / row["time/step"]


def of_runs(runs: list[Run], name: str) -> list[float]:
    """Return the median of a metric over each run's steps."""
    return [statistics.median(row.get(name, 0.0) for row in run.rows) for run in runs]


def main() -> bool:
    """Measure in turn and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        found = alternate(long_tails(Path(folder)), SIDES, rounds=5)
    figures, bars = [], []
    for side, runs in found.items():
        shares = [statistics.median(overhead(row) for row in run.rows) for run in runs]
        figures.append(Figure(side, "step", "s", of_runs(runs, "time/step")))
        figures += [Figure(side, name, "s", of_runs(runs, name)) for name in (*WORKS, "time/actor_sync")]
        figures.append(Figure(side, "overhead", "share of a step", shares))
        bars.append(OVERHEAD[side].at(statistics.median(shares)))
    return BENCHMARK.write(figures, bars, NOTES)
