"""`python -m benchmarks NAME`, or `all` that need no GPU. The exit status is 1 when a bar does not hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from benchmarks import (
    against_trl,
    data,
    data_plane,
    distill,
    growth,
    install,
    layouts,
    learning,
    logprobs,
    lora,
    memory,
    overhead,
    plan,
    reshard,
    rewards,
    serve_load,
    start,
    weight_sync,
)
from benchmarks.against_trl import others
from benchmarks.episodes import learning as episodes
from benchmarks.gpu import doctor
from benchmarks.real import learning as real
from benchmarks.report import Benchmark

PROGRAMS: tuple[tuple[Benchmark, Callable[[], bool]], ...] = (
    (learning.BENCHMARK, learning.main),
    (data.BENCHMARK, data.main),
    (data_plane.BENCHMARK, data_plane.main),
    (distill.BENCHMARK, distill.main),
    (layouts.BENCHMARK, layouts.main),
    (reshard.BENCHMARK, reshard.main),
    (weight_sync.BENCHMARK, weight_sync.main),
    (plan.BENCHMARK, plan.main),
    (against_trl.QUICKSTART, against_trl.quickstart),
    (against_trl.LONG_TAIL, against_trl.long_tail),
    (against_trl.LONG_TAIL_BF16, against_trl.long_tail_bf16),
    (others.ONLINE_DPO, others.online_dpo),
    (others.PPO, others.ppo),
    (logprobs.BENCHMARK, logprobs.main),
    (lora.BENCHMARK, lora.main),
    (overhead.BENCHMARK, overhead.main),
    (growth.BENCHMARK, growth.main),
    (install.BENCHMARK, install.main),
    (start.BENCHMARK, start.main),
    (memory.BENCHMARK, memory.main),
    (episodes.BENCHMARK, episodes.main),
    (rewards.BENCHMARK, rewards.main),
    (serve_load.BENCHMARK, serve_load.main),
    (real.BENCHMARK, real.main),
    (doctor.BENCHMARK, lambda: doctor.main([])),
)
BENCHMARKS = {declared.name: run for declared, run in PROGRAMS}
"""What runs a benchmark, by the name of its results."""
DECLARED = {declared.name: declared for declared, _ in PROGRAMS}
ON_CPU = [name for name in BENCHMARKS if name != "gpu"]
"""The benchmarks that `all` runs."""


def main(argv: list[str]) -> int:
    """Run the named benchmarks."""
    names = ON_CPU if argv in ([], ["all"]) else argv
    for name in names:
        if name not in BENCHMARKS:
            print(f"no benchmark {name!r}; there are: all, {', '.join(BENCHMARKS)}", file=sys.stderr)
            return 2
    if "gpu" not in names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `auto` would take a GPU, and the other side computes on the CPU
    held = [BENCHMARKS[name]() for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
