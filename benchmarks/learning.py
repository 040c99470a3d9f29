"""Do the algorithms learn? The shipped experiment of each, through Ray on two workers, with three seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import GRPO, Bar, Benchmark, DeclaredBar, Figure, at_least, at_most

SEEDS = (0, 1, 2)
AFTER = {"quickstart": 0.90, "ppo": 0.85, "online_dpo": 0.85, "rejection_sampling": 0.75}
"""The held-out accuracy that every seed of an experiment has to reach; `quickstart` is GRPO's, and `make train`."""
BEFORE = 0.40
SECONDS = 300

Run = Mapping[str, float]


def declared(experiment: str) -> tuple[DeclaredBar, DeclaredBar, DeclaredBar]:
    """Return the bars of one experiment: accuracy before, accuracy after, and seconds."""
    return (
        at_most(f"{experiment}: accuracy before, worst seed", BEFORE),
        at_least(f"{experiment}: accuracy after, worst seed", AFTER[experiment]),
        at_most(f"{experiment}: whole command, slowest seed (s)", SECONDS),
    )


BENCHMARK = Benchmark(
    "learning",
    measures=(
        *GRPO,
        *(f"algorithms/rlcore_{name}.py" for name in ("ppo", "online_dpo", "rejection_sampling")),
        *(f"configs/experiment/{name}.yaml" for name in AFTER),
        "benchmarks/learning.py",
    ),
    bars=tuple(bar for experiment in AFTER for bar in declared(experiment)),
)


def train(experiment: str, seed: int, folder: Path, *overrides: str) -> dict[str, float]:
    """Run an experiment with a seed, in a process of its own; return its summary and the seconds that it took."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rlcore.cli", "train", f"experiment={experiment}"]
    subprocess.run(
        [*command, f"trainer.seed={seed}", f"run.dir={folder}", *overrides],
        check=True,
        env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )
    return {**json.loads((folder / "summary.json").read_text()), "wall_seconds": time.perf_counter() - start}


def figures(experiment: str, runs: Sequence[Run]) -> list[Figure]:
    """Return what was measured in the runs of one experiment."""
    measured = [
        ("accuracy_before", "held-out accuracy before", "share of samples"),
        ("accuracy_after", "held-out accuracy after", "share of samples"),
        ("wall_seconds", "whole command", "s"),
        ("train_seconds", "training steps", "s"),
        ("tokens_per_second", "prompt and response tokens", "1/s"),
    ]
    return [Figure("rlcore", f"{experiment}: {name}", unit, [run[key] for run in runs]) for key, name, unit in measured]


def bars(experiment: str, runs: Sequence[Run]) -> list[Bar]:
    """Return the bars of one experiment, each for its worst seed."""
    keys = ("accuracy_before", "accuracy_after", "wall_seconds")
    before, after, seconds = ([run[key] for run in runs] for key in keys)
    worst = (max(before), min(after), max(seconds))
    return [bar.at(value) for bar, value in zip(declared(experiment), worst, strict=True)]


def main() -> bool:
    """Run all experiments with all seeds and write the results."""
    runs: dict[str, list[Run]] = {experiment: [] for experiment in AFTER}
    with tempfile.TemporaryDirectory() as place:
        # Seed by seed, so that a machine that slows down shows in every experiment.
        for seed in SEEDS:
            for experiment, done in runs.items():
                done.append(train(experiment, seed, Path(place) / f"{experiment}-{seed}"))
    notes = (
        f"`rlcore train experiment=NAME` for {', '.join(AFTER)} (`quickstart` is GRPO) with seeds 0, 1 and 2: sampled "
        "accuracy (temperature 1) on 256 held-out prompts. There is no other side: this asks whether they learn."
    )
    measured = [figure for experiment, done in runs.items() for figure in figures(experiment, done)]
    kept = [bar for experiment, done in runs.items() for bar in bars(experiment, done)]
    return BENCHMARK.write(measured, kept, notes)
