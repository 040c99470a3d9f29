"""One measurement of B=logprobs, printed as a JSON line: `python -m benchmarks.logprobs_side SIDE KIND`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.logprobs import ALONE, BOTH, HIDDEN, POSITIONS, THREADS, VOCABULARY
from rlcore.ops import chunked_log_probs, token_log_probs

Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy from all logits."""
    return token_log_probs(torch.nn.functional.linear(hidden, weight), labels)


def dense_alone(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs from all logits, and no entropy."""
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight), dim=-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), torch.zeros(len(labels))


CALLS: dict[tuple[str, str], Both] = {
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
    call = CALLS[side, kind]
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
        backward(CALLS[side, kind](hidden, weight, labels), kind, given, [hidden, weight])
        for side in ("rlcore", "dense")
    )
    pairs = zip(ours, theirs, strict=True)
    return {"difference": max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)}


if __name__ == "__main__":
    print(json.dumps(difference(sys.argv[2]) if sys.argv[1] == "compare" else measure(*sys.argv[1:])))
