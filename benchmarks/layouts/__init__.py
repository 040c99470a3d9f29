"""What training layouts cost: memory of a rank, bytes on the wire and seconds of a step, on 4 processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.models import write_llama
from benchmarks.report import Benchmark, Figure

SCRIPT = Path(__file__).with_name("ranks.py")
WORLD, ROUNDS = 4, 4
"""The first step connects the processes, makes the moments, and is not measured."""
LAYOUTS = {
    "1-1-4, shards over 4": [1, 1, 4, 4],
    "1-1-4, shards over 2": [1, 1, 4, 2],
    "1-1-4, a copy each": [1, 1, 4, 1],
    "1-2-2, shards over 2": [1, 2, 2, 2],
    "1-4-1": [1, 4, 1, 1],
    "2-1-2, shards over 2": [2, 1, 2, 2],
    "2-2-1": [2, 2, 1, 1],
    "4-1-1": [4, 1, 1, 1],
}
BENCHMARK = Benchmark(
    "layouts",
    measures=(
        *("rlcore/engine", "rlcore/engines/torch", "rlcore/ops", "algorithms/rlcore_grpo.py"),
        *("benchmarks/layouts", "benchmarks/models.py"),
    ),
)
NOTES = """\
{world} gloo processes with one thread each on one machine of {cores} cores; a Llama of 8 layers and hidden 512 in fp32,
P = {p:.0f} MiB; one GRPO update of 16 rows of 64 tokens, in micro-batches of 4 rows. A layout is pp-tp-dp. Held:
weights, gradients and AdamW's moments of the rank with the most, 4 P being all of one. Sent: what the kernel received
over the loopback in a step, of all ranks together, with TCP's own. Seconds: with more processes than cores they say
what a layout adds in work and waiting, not how it scales.

| layout | held by a rank, of 4 P | sent in a step, of P | seconds |
| --- | --- | --- | --- |
{table}"""


def main() -> bool:
    """Measure every layout and write the results."""
    with tempfile.TemporaryDirectory() as name:
        folder, result = Path(name), Path(name) / "result.json"
        weights = sum(shape.numel() for shape in write_llama(folder / "model")) * 4
        arguments = [str(WORLD), str(folder / "store"), str(result), str(folder / "model"), str(ROUNDS)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        layouts = json.dumps(list(LAYOUTS.values()))
        processes = [
            subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *arguments, layouts], env=env)
            for rank in range(WORLD)
        ]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise RuntimeError("a rank failed; what it said is above")
        found = json.loads(result.read_text())
    figures, table = [], []
    for name, ranks in zip(LAYOUTS, zip(*found, strict=True), strict=True):
        held = max(rank["held"] for rank in ranks) / (4 * weights)
        sent = [each / weights for each in ranks[0]["sent"]]
        seconds = ranks[0]["seconds"]
        figures += [Figure("rlcore", f"{name}: a step", "s", seconds), Figure("rlcore", f"{name}: sent", "P", sent)]
        figures.append(Figure("rlcore", f"{name}: held by a rank", "share of 4 P", [held]))
        table.append(f"| {name} | {held:.3f} | {statistics.median(sent):.2f} | {statistics.median(seconds):.2f} |")
    notes = NOTES.format(world=WORLD, cores=os.cpu_count(), p=weights / 2**20, table="\n".join(table))
    return BENCHMARK.write(figures, [], notes)
