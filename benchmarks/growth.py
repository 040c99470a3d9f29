"""How the time of a step grows with rows, response length, group size, workers and model size, against its work."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from benchmarks.against_trl import Side, Work, long_tails, run
from benchmarks.models import write_characters
from benchmarks.plot import draw
from benchmarks.report import GRPO, Benchmark, Figure, at_most, plot_file

STEPS = 6
"""The first does not count."""
NOISE = 1.1
"""Seconds may grow by so much more than the work does, from any point of an axis to any later one."""
ROWS, LENGTH, GROUP, WORKERS, SIZE = AXES = (
    "rows",
    "response length",
    "group size, of 64 rows",
    "workers, one thread each",
    "parameters (M)",
)
GROWTH = {axis: at_most(f"{axis}: growth of seconds, by that of the work", NOISE) for axis in AXES}
PLOTS = {axis: f"growth_{axis.split()[0].rstrip(',')}" for axis in AXES}
BENCHMARK = Benchmark(
    "growth",
    measures=(*GRPO, "benchmarks/growth.py", "benchmarks/against_trl/__init__.py", "benchmarks/models.py"),
    bars=tuple(GROWTH.values()),
    plots=tuple(PLOTS.values()),
)
HIDDEN, LAYERS, PROMPT = 256, 8, 40
NOTES = f"""\
GRPO without a reference on the long-tail workload's model (8 layers, hidden 256) with responses of exactly the length
given, fp32, two cores, Ray with two workers unless workers are what grows; where an axis is not the one that grows: 8
prompts x 8 samples, 64 new tokens. Micro-batches of 2,048 tokens, as on the long tail. Work: the floating-point
operations of the matrices and of causal attention (see rlcore/roles/row_cost.py) of the tokens that have to be
computed, which of a prompt are those of one row of its group. Seconds: the median of {STEPS - 1} steps of one run; of
two runs of the point in which the axes meet. A bar is the largest growth between any two points of an axis. A plot of
each axis is beside this table. There is no other side."""


@dataclass(frozen=True)
class Point:
    """A run: where it stands on its axis, what it trains, and what a step costs in arithmetic, in any unit."""

    at: float
    work: Work
    settings: Sequence[str]
    operations: float


def operations(rows: int, response: int, hidden: int = HIDDEN, layers: int = LAYERS, samples: int = 8) -> float:
    """Return a step's operations: a layer's matrices have 12 d^2 parameters.

    Five forwards' worth: sampling, the log-probs before the update (as forced lengths change those of sampling), and
    forward and backward. A group's prompt goes through the matrices once each time; in attention each row has its own.
    """
    through_matrices, length = response + PROMPT / samples, PROMPT + response
    return rows * layers * 5 * (24 * hidden**2 * through_matrices + 2 * hidden * length**2)


def axes(base: Work, folder: Path) -> dict[str, list[Point]]:
    """Return the points of each axis."""

    def forced(work: Work, workers: int = 2) -> Sequence[str]:
        lengths = (f"rollout.min_tokens={work.response_len}", "engine.micro_batch_tokens=2048")
        return (*lengths, "cluster=local", f"cluster.workers={workers}")

    def point(at: float, work: Work, cost: float, workers: int = 2) -> Point:
        return Point(at, work, forced(work, workers), cost)

    found: dict[str, list[Point]] = {}
    rows = [(8 * n, replace(base, prompts=n)) for n in (4, 8, 16, 32)]
    found[ROWS] = [point(n, work, operations(n, 64)) for n, work in rows]
    lengths = (64, 128, 256, 512)
    found[LENGTH] = [point(n, replace(base, response_len=n), operations(64, n)) for n in lengths]
    groups = [(n, replace(base, prompts=64 // n, samples=n)) for n in (2, 4, 8, 16, 32)]
    found[GROUP] = [point(n, work, operations(64, 64, samples=n)) for n, work in groups]
    found[WORKERS] = [point(n, base, operations(64, 64), n) for n in (1, 2, 4)]
    sizes = []
    for hidden in (128, HIDDEN, 512):
        work = base
        if hidden != HIDDEN:
            write_characters(folder / str(hidden), hidden=hidden)
            work = replace(base, model=str(folder / str(hidden)))
        sizes.append(point(12 * hidden**2 * LAYERS / 1e6, work, operations(64, 64, hidden)))
    found[SIZE] = sizes
    return found


def worst_growth(seconds: Sequence[float], operations: Sequence[float]) -> float:
    """Return the largest growth of the seconds by that of the work, over all pairs of points in order.

    End points alone would hide a point in the middle: with 6.1, 4.6 and 6.0 s for the same work, the last is 30% slower
    than the second.
    """
    costs = [time / work for time, work in zip(seconds, operations, strict=True)]
    return max(later / earlier for earlier, later in combinations(costs, 2))


def seconds(point: Point) -> list[float]:
    """Train and return the seconds of the counted steps."""
    with tempfile.TemporaryDirectory() as folder:
        return run(point.work, Side("rlcore", 2, point.settings), Path(folder)).seconds


def main(measure: Callable[[Point], list[float]] = seconds) -> bool:
    """Measure every axis and write the results and the plots."""
    figures, bars = [], []
    found: dict[tuple[Work, Sequence[str]], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = replace(long_tails(folder), response_len=64, steps=STEPS, warm=1)
        by_axis = axes(base, folder)
        for points in by_axis.values():
            for point in points:
                times = found.setdefault((point.work, point.settings), [])
                if len(times) < 2 * (STEPS - 1):
                    times.extend(measure(point))
    for axis, points in by_axis.items():
        times = [found[point.work, point.settings] for point in points]
        medians = [statistics.median(each) for each in times]
        figures += [
            Figure("rlcore", f"{axis} {point.at:.4g}: step", "s", each)
            for point, each in zip(points, times, strict=True)
        ]
        grown = worst_growth(medians, [point.operations for point in points])
        bars.append(GROWTH[axis].at(grown))
        measured = [(point.at, each) for point, each in zip(points, medians, strict=True)]
        scale = medians[0] / points[0].operations
        expected = [(point.at, point.operations * scale) for point in points]
        file = plot_file(PLOTS[axis])
        lines = {"measured": measured, "~as the work": expected}
        draw(file, f"A step against {axis}", axis, "seconds", lines, logarithmic=True)
    return BENCHMARK.write(figures, bars, NOTES)
