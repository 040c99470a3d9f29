"""How long a start takes with a million rows of a file, encoded for the first time and read from the cache."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Benchmark, Figure, at_most

ROWS = 1_000_000
ROUNDS = 3
COLD, WARM, MEMORY = (
    at_most("a million rows, empty cache: seconds to the first batch", 20),
    at_most("a million rows, filled cache: seconds to the first batch", 5),
    at_most("a million rows: largest memory (GB)", 1),
)
BENCHMARK = Benchmark("data", measures=("rlcore/data", "benchmarks/data.py"), bars=(COLD, WARM, MEMORY))
NOTES = """\
A run's process reads a JSON Lines file of a million rows (`data=file`, of which `data.held_out_share` is held out),
renders and tokenises every prompt with the tiny model's template, in a process for each core, and takes the first
batch. Memory is the largest resident set of the run's own process, with torch and transformers (0.5 GB). There is no
other side."""


def write_rows(path: Path) -> None:
    """Write a file of `ROWS` different prompts."""
    with path.open("w") as file:
        for number in range(ROWS):
            file.write(json.dumps({"prompt": f"{number}+{number % 97}=", "answer": str(number + number % 97)}) + "\n")


def first_batch(path: str) -> None:
    """Print the seconds until the first batch, and the largest memory in GB."""
    from rlcore.config.schema import DataConfig, ModelConfig
    from rlcore.data.chat import load_tokenizer
    from rlcore.data.loader import PromptLoader
    from rlcore.plugins import PluginManager

    dataset, tokenizer = PluginManager.load().datasets()["file"], load_tokenizer(ModelConfig())
    began = time.perf_counter()
    PromptLoader(DataConfig(name="file", path=path), dataset, tokenizer, seed=0).next_batch()
    seconds = time.perf_counter() - began
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6]))


def main() -> bool:
    """Measure in turn and write the results."""
    cold, warm, memory = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows)
        for number in range(ROUNDS):
            environment = {**os.environ, "RLCORE_CACHE": str(Path(folder) / f"cache{number}")}
            for found in (cold, warm):
                command = [sys.executable, "-c", f"from benchmarks.data import first_batch; first_batch({str(rows)!r})"]
                done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
                seconds, gigabytes = json.loads(done.stdout)
                found.append(seconds)
                memory.append(gigabytes)
    figures = [
        Figure("empty cache", "first batch of a million rows", "s", cold),
        Figure("filled cache", "first batch of a million rows", "s", warm),
        Figure("both", "largest memory", "GB", memory),
    ]
    bars = [COLD.at(statistics.median(cold)), WARM.at(statistics.median(warm)), MEMORY.at(max(memory))]
    return BENCHMARK.write(figures, bars, NOTES)
