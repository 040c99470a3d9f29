"""Steps of the quickstart: as they are, and as they were before batches stayed where they were made."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BEFORE = "bf488d8"
"""The last commit whose calls brought their results to the controller."""
STEPS, WARM_UP = 14, 4


def install_before(folder: Path) -> Path:
    """Put the package of that commit into a folder, for the path of a process, and return it."""
    tree, target = folder / "tree", folder / "package"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", BEFORE], cwd=REPOSITORY, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(tree)], check=True)
    return target


def seconds_a_step(folder: Path, package: Path | None) -> float:
    """Return the median of time/step in a run of its own, after the first steps."""
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if package is not None:
        env["PYTHONPATH"] = str(package)
    command = [sys.executable, "-m", "rlcore.cli", "train", "experiment=quickstart", f"run.dir={folder}"]
    options = [f"trainer.total_steps={STEPS}", "trainer.eval_every=0"]
    subprocess.run([*command, *options], check=True, env=env, cwd=folder.parent, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [line["time/step"] for line in lines if "time/step" in line]
    return statistics.median(times[WARM_UP:])
