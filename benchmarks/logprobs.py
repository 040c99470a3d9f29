"""Log-probs and entropy from hidden states, against what autograd does with all logits: time, memory, gradients."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from benchmarks.report import Benchmark, Figure, at_most

POSITIONS, VOCABULARY, HIDDEN = 4096, 151_936, 896
THREADS, ROUNDS = 2, 5
MIB = 2**20
LOGITS = POSITIONS * VOCABULARY * 4
"""Bytes of all logits in fp32."""
NOTES = f"""\
{POSITIONS} tokens, vocabulary {VOCABULARY}, hidden {HIDDEN}, fp32, {THREADS} threads: log-probs and entropy, and
log-probs alone, of which a random weighted sum goes backward to the hidden states and the weight. Dense: all logits
({LOGITS / MIB:.0f} MiB), log_softmax, and autograd. Each measurement is a process of its own, the sides in turn. Extra
memory: the most resident memory (the kernel's own high-water mark) less what was resident before, less results and
gradients. Gradients: the largest difference between the sides' by the largest entry of dense's."""

SIDES = ("dense", "rlcore")
BOTH, ALONE = KINDS = ("log-probs and entropy", "log-probs alone")
FORWARD = at_most(f"{BOTH}: forward, times dense", 1.1)
TIMES = {
    BOTH: at_most(f"{BOTH}: forward and backward, times dense", 1.15),
    ALONE: at_most(f"{ALONE}: forward and backward, times dense", 1.5),
}
MEMORY = {kind: at_most(f"{kind}: peak extra memory, of all logits", 0.1) for kind in KINDS}
GRADIENTS = {kind: at_most(f"{kind}: difference of the gradients", 1e-5) for kind in KINDS}
BENCHMARK = Benchmark(
    "logprobs",
    measures=("rlcore/ops/logprobs.py", "benchmarks/logprobs.py", "benchmarks/logprobs_side.py"),
    bars=(FORWARD, *TIMES.values(), *MEMORY.values(), *GRADIENTS.values()),
)


def child(side: str, kind: str) -> dict[str, float]:
    """Measure one side in a process of its own; `side` "compare" compares the gradients of both."""
    command = [sys.executable, "-m", "benchmarks.logprobs_side", side, kind]
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> bool:
    """Measure both sides in turn and write the results."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {(side, kind): [] for kind in KINDS for side in SIDES}
    for _ in range(ROUNDS):
        for (side, kind), found in runs.items():
            found.append(child(side, kind))
    figures, medians = [], {}
    for (side, kind), found in runs.items():
        for key, name, unit, scale in (
            ("forward", "forward", "s", 1),
            ("both", "forward and backward", "s", 1),
            ("memory", "peak extra memory", "MiB", MIB),
        ):
            values = [each[key] / scale for each in found]
            figures.append(Figure(side, f"{kind}: {name}", unit, values))
            medians[side, kind, key] = statistics.median(values)

    def times(kind: str, key: str) -> float:
        return medians["rlcore", kind, key] / medians["dense", kind, key]

    bars = [FORWARD.at(times(BOTH, "forward")), *(TIMES[kind].at(times(kind, "both")) for kind in KINDS)]
    for kind in KINDS:
        share = medians["rlcore", kind, "memory"] * MIB / LOGITS
        bars.append(MEMORY[kind].at(share))
        bars.append(GRADIENTS[kind].at(child("compare", kind)["difference"]))
    return BENCHMARK.write(figures, bars, NOTES)
