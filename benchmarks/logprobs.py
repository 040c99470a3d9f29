"""Log-probs and entropy from hidden states, against what autograd does with all logits: time, memory, gradients.

`python -m benchmarks.logprobs SIDE KIND` is one measurement, in a process of its own, printed as a JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Benchmark, Figure, at_most
from rlcore.ops import chunked_log_probs, token_log_probs

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
    measures=("rlcore/ops/logprobs.py", "benchmarks/logprobs.py"),
    bars=(FORWARD, *TIMES.values(), *MEMORY.values(), *GRADIENTS.values()),
)

Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy from all logits."""
    return token_log_probs(torch.nn.functional.linear(hidden, weight), labels)


def dense_alone(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs from all logits, and no entropy."""
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight), dim=-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), torch.zeros(len(labels))


SIDES: dict[tuple[str, str], Both] = {
    ("dense", BOTH): dense,
    ("rlcore", BOTH): chunked_log_probs,
    ("dense", ALONE): dense_alone,
    ("rlcore", ALONE): chunked_log_probs,
}


def inputs(positions: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, labels, and the results' gradients [2, positions]."""
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, HIDDEN, generator=numbers).requires_grad_()
    weight = torch.randn(vocabulary, HIDDEN, generator=numbers).mul_(0.05).requires_grad_()
    labels = torch.randint(vocabulary, (positions,), generator=numbers)
    return hidden, weight, labels, torch.randn(2, positions, generator=numbers)


def resident(key: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def backward(results: tuple[Tensor, Tensor], kind: str, given: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a weighted sum of what the kind of measurement asks for."""
    number = 1 if kind == ALONE else 2
    return torch.autograd.grad(results[:number], of, list(given[:number]))


def measure(side: str, kind: str) -> dict[str, float]:
    """Go forward and backward once."""
    torch.set_num_threads(THREADS)
    call = SIDES[side, kind]
    hidden, weight, labels, given = inputs(64, 1024)
    backward(call(hidden, weight, labels), kind, given, [hidden, weight])  # the libraries' own first time
    hidden, weight, labels, given = inputs(POSITIONS, VOCABULARY)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    start = time.perf_counter()
    results = call(hidden, weight, labels)
    middle = time.perf_counter()
    grads = backward(results, kind, given, [hidden, weight])
    end = time.perf_counter()
    kept = sum(each.numel() * 4 for each in (*results, *grads))
    return {"forward": middle - start, "both": end - start, "memory": resident("VmHWM") - before - kept}


def difference(kind: str) -> dict[str, float]:
    """Compare the sides' gradients."""
    torch.set_num_threads(THREADS)
    hidden, weight, labels, given = inputs(POSITIONS, VOCABULARY)
    ours, theirs = (
        backward(SIDES[side, kind](hidden, weight, labels), kind, given, [hidden, weight])
        for side in ("rlcore", "dense")
    )
    pairs = zip(ours, theirs, strict=True)
    return {"difference": max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)}


def child(side: str, kind: str) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.logprobs", side, kind]
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> bool:
    """Measure both sides in turn and write the results."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in SIDES}
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


if __name__ == "__main__":
    print(json.dumps(difference(sys.argv[2]) if sys.argv[1] == "compare" else measure(*sys.argv[1:])))
