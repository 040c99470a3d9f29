"""How long until the first token is sampled, from the moment that `rlcore train` is called; and until `--help` ends."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Benchmark, Figure, at_most

ROUNDS = 5
COMMAND = [sys.executable, "-m", "rlcore.cli"]
BOUNDS = {"in_process": 1.0, "local": 2.4}
"""Times a bare import of the model class measured beside it, by `cluster=`: machines differ."""
NAMES = {"in_process": "in process", "local": "Ray, two workers"}
FIRST = {
    cluster: at_most(f"{NAMES[cluster]}: first sampled token, times a bare import", bound)
    for cluster, bound in BOUNDS.items()
}
HELP = at_most("--help (s)", 1.0)
BENCHMARK = Benchmark(
    "start", measures=("rlcore", "algorithms", "configs", "benchmarks/start.py"), bars=(*FIRST.values(), HELP)
)
NOTES = """\
`rlcore train experiment=quickstart` (its evaluation left out) with responses of one token: from the start of the
process until the first call that samples has ended on the first worker, by the run's own trace (trainer.trace). Ray: a
Ray of its own on this machine, started within the time. There is no other side; for scale, what a process takes that
does nothing but import torch and the model class from transformers, which every side of every such benchmark does, and
on Ray the controller and each worker."""


def to_first_token(cluster: str, folder: Path) -> float:
    """Train one step in a process of its own and return the seconds until its first token."""
    settings = [f"cluster={cluster}", "trainer.total_steps=1", "trainer.eval_every=0", "rollout.response_len=1"]
    command = [*COMMAND, "train", "experiment=quickstart", *settings, "trainer.trace=true", "tracker=none"]
    start = time.time()
    subprocess.run([*command, f"run.dir={folder}"], check=True, env=environment(), stdout=subprocess.DEVNULL)
    text = (folder / "timeline.json").read_text().rstrip().rstrip(",").removesuffix("]").rstrip().rstrip(",")
    sampled = [event for event in json.loads(text + "]") if event["name"] == "actor.generate"]
    return min(event["ts"] + event["dur"] for event in sampled) / 1e6 - start


def to_end(command: list[str]) -> float:
    """Return the seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def environment() -> dict[str, str]:
    """Return the environment that the Makefile sets too."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "",
    }


def main() -> bool:
    """Measure in turn and write the results."""
    runs: dict[str, list[float]] = {cluster: [] for cluster in BOUNDS}
    helps, imports = [], []
    for _ in range(ROUNDS):
        imports.append(to_end([sys.executable, "-c", "from transformers import Qwen2ForCausalLM"]))
        for cluster, found in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(to_first_token(cluster, Path(folder) / "run"))
        helps.append(to_end([*COMMAND, "--help"]))
    figures = [Figure(NAMES[cluster], "first sampled token", "s", found) for cluster, found in runs.items()]
    figures.append(Figure("rlcore --help", "whole command", "s", helps))
    figures.append(Figure("transformers", "bare import of the model class", "s", imports))
    bars = [FIRST[cluster].at(statistics.median(found) / statistics.median(imports)) for cluster, found in runs.items()]
    bars.append(HELP.at(statistics.median(helps)))
    return BENCHMARK.write(figures, bars, NOTES)
