"""Does the quickstart learn? `make train`'s own configuration, through Ray on two workers, with three seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Bar, Figure, write

SEEDS = (0, 1, 2)


def train(seed: int, folder: Path) -> dict[str, float]:
    """Run the quickstart with a seed, in a process of its own, and return its summary and the seconds that it took."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rlcore.cli", "train", "experiment=quickstart"]
    subprocess.run(
        [*command, f"trainer.seed={seed}", f"run.dir={folder}"],
        check=True,
        env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )
    return {**json.loads((folder / "summary.json").read_text()), "wall_seconds": time.perf_counter() - start}


def main() -> bool:
    """Run all seeds and write the results."""
    with tempfile.TemporaryDirectory() as place:
        runs = [train(seed, Path(place) / str(seed)) for seed in SEEDS]

    def figure(key: str, name: str, unit: str) -> Figure:
        return Figure("rlcore", name, unit, [run[key] for run in runs])

    figures = [
        figure("accuracy_before", "held-out accuracy before", "share of samples"),
        figure("accuracy_after", "held-out accuracy after", "share of samples"),
        figure("wall_seconds", "whole command", "s"),
        figure("train_seconds", "training steps", "s"),
        figure("tokens_per_second", "prompt and response tokens", "1/s"),
    ]
    bars = [
        Bar("accuracy before, worst seed", max(run["accuracy_before"] for run in runs), 0.40, at_least=False),
        Bar("accuracy after, worst seed", min(run["accuracy_after"] for run in runs), 0.90, at_least=True),
        Bar("whole command, slowest seed (s)", max(run["wall_seconds"] for run in runs), 360, at_least=False),
    ]
    notes = (
        "`rlcore train experiment=quickstart` with seeds 0, 1 and 2: sampled accuracy (temperature 1) on 256 held-out "
        "prompts. There is no other side: this asks whether it learns."
    )
    return write("learning", "make bench B=learning", figures, bars, notes)
