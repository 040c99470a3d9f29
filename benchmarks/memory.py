"""Resident memory of the controller and the workers over 500 steps."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.against_trl import small_steps, tree
from benchmarks.plot import draw
from benchmarks.report import GRPO, Benchmark, Figure, at_most, plot_file

STEPS, WARM = 500, 100
MIB = 2**20
EXECUTORS = {"in process": ("cluster=in_process",), "Ray": ("cluster=local", "cluster.workers=2")}
PROCESSES = {"in process": ("controller",), "Ray": ("controller", "worker 0", "worker 1", "worker 2")}
"""On Ray two workers train and one scores."""
GROWTH = {
    (executor, process): at_most(f"{executor}: {process}: growth in 100 steps, share", 0.01)
    for executor, processes in PROCESSES.items()
    for process in processes
}
"""Of a process's memory."""
BENCHMARK = Benchmark(
    "memory",
    measures=(*GRPO, "benchmarks/memory.py", "benchmarks/against_trl/__init__.py"),
    bars=tuple(GROWTH.values()),
    plots=("memory",),
)
NOTES = f"""\
The quickstart's work (GRPO, shipped model, 16 prompts x 8 samples) for {STEPS} steps: the resident memory (VmRSS) of
the controller and of each worker twice a second. Growth: the median slope between all pairs of moments (Theil and
Sen) after step {WARM}, by the memory there. In process the controller is the worker. A plot is beside this table.
There is no other side."""

Series = list[tuple[float, float]]
"""Steps, and MiB."""


def role(pid: int) -> str | None:
    """Return what a process is to the run, or None for what is not rlcore's training."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:  # it has ended meanwhile
        return None
    return f"worker {pid}" if words[0].startswith("ray::WorkerHost") else None


def resident(pid: int) -> float:
    """Return a process's resident memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def watch(settings: Sequence[str], folder: Path) -> dict[str, Series]:
    """Train, and return the memory of each process by its role."""
    work = small_steps(folder)
    command = [sys.executable, "-m", "rlcore.cli", "train", "algo=grpo", "algo.kl_coef=0", "data=file"]
    command += [f"data.path={work.data}", f"reward.path={work.reward}:score", "data.batch_size=16"]
    command += ["rollout.response_len=16", f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "tracker=none"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    file = folder / "run" / "metrics.jsonl"
    series: dict[str, Series] = {}
    process = subprocess.Popen([*command, f"run.dir={folder / 'run'}", *settings], env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.5)
        step = file.read_bytes().count(b"\n") if file.exists() else 0
        for pid in tree(process.pid):
            name = "controller" if pid == process.pid else role(pid)
            try:
                if name is not None and 0 < step < STEPS:
                    series.setdefault(name, []).append((step, resident(pid)))
            except (OSError, IndexError):  # it has ended meanwhile
                continue
    if process.returncode:
        raise RuntimeError(f"rlcore failed with status {process.returncode}")
    workers = sorted(name for name in series if name != "controller")
    return {"controller": series["controller"], **{f"worker {i}": series[name] for i, name in enumerate(workers)}}


def slope(line: Series) -> float:
    """Return the median growth a step over all pairs of moments."""
    line = [point for point in line if point[0] >= WARM]
    pairs = [(a, b) for i, a in enumerate(line) for b in line[i + 1 :] if b[0] > a[0]]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def main() -> bool:
    """Watch both executors and write the results and the plot."""
    figures, bars = [], []
    lines: dict[str, Series] = {}
    for name, settings in EXECUTORS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = watch(settings, Path(folder))
        for who, line in found.items():
            lines[f"{name}: {who}"] = line
            late = [value for step, value in line if step >= WARM]
            figures.append(Figure(f"{name}: {who}", f"resident memory after step {WARM}", "MiB", late))
            growth = slope(line) * 100 / late[0]
            bars.append(GROWTH[name, who].at(growth))
    draw(plot_file("memory"), "Resident memory", "step", "MiB", lines, logarithmic=False)
    return BENCHMARK.write(figures, bars, NOTES)
