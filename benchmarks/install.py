"""What an install costs: CPU seconds of the Makefile's venvs with uv and an empty cache, and of pip's `.venv`."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Benchmark, Figure, at_most

ROOT = Path(__file__).parents[1]
ROUNDS = 3
TARGETS = (".venv/.installed", ".venv/.installed-dev", ".venv-verifiers/.installed", ".venv-vllm/.installed")
"""The Makefile's targets, each after those that it needs. The first is what `make train` installs."""
TRAINING = at_most("CPU seconds of .venv for training", 30)
TOGETHER = at_most("CPU seconds of .venv, .venv-vllm and .venv-verifiers for tests", 120)
BENCHMARK = Benchmark(
    "install",
    measures=(
        *("install.py", "Makefile", "pyproject.toml", "constraints.txt", "requirements-vllm.txt"),
        *("requirements-verifiers.txt", "benchmarks/install.py"),
    ),
    bars=(TRAINING, TOGETHER),
)
NOTES = """\
`make` of each venv's target in a copy of the checkout, with an empty cache of uv; CPU seconds (user and system) of all
processes, and seconds by the clock, which depend on the network. pip: the same packages for training, by the command in
README, into a venv of its own without a cache, once. pip also compiles all modules to bytecode; after uv, Python
compiles a module at its first import."""


def measure(command: Sequence[str], folder: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Run a command and return its CPU seconds, those of all its processes, and its seconds by the clock."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - start


def copy_of_checkout(folder: Path) -> Path:
    """Copy the files that git tracks or would track, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def with_uv() -> dict[str, tuple[float, float]]:
    """Install all venvs into a new folder and return each target's CPU seconds and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_of_checkout(Path(folder) / "checkout")
        variables = {"UV_CACHE_DIR": str(Path(folder) / "cache"), "VENV": ".venv"}
        return {target: measure(["make", target], checkout, variables) for target in TARGETS}


def with_pip() -> tuple[float, float]:
    """Install the packages for training with pip, and return the CPU seconds and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_of_checkout(Path(folder) / "checkout")
        subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=checkout, check=True)
        plugins = [f"plugins/rlcore-plugin-{name}" for name in ("plan", "judge", "testing")]
        editable = [word for name in (".", *plugins) for word in ("-e", name)]
        command = [".venv/bin/python", "-m", "pip", "install", "--no-cache-dir", *editable, "-c", "constraints.txt"]
        return measure(command, checkout, {})


def main() -> bool:
    """Measure in turn and write the results."""
    runs = [with_uv() for _ in range(ROUNDS)]
    pip_cpu, pip_seconds = with_pip()
    figures = []
    for target in TARGETS:
        figures.append(Figure(f"make {target}", "CPU", "s", [run[target][0] for run in runs]))
        figures.append(Figure(f"make {target}", "clock", "s", [run[target][1] for run in runs]))
    figures += [Figure("pip, .venv for training", "CPU", "s", [pip_cpu])]
    figures += [Figure("pip, .venv for training", "clock", "s", [pip_seconds])]
    training = statistics.median(run[TARGETS[0]][0] for run in runs)
    together = statistics.median(sum(cpu for cpu, _ in run.values()) for run in runs)
    return BENCHMARK.write(figures, [TRAINING.at(training), TOGETHER.at(together)], NOTES)
