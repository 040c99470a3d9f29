"""`python -m benchmarks NAME`, or `all` that need no GPU. The exit status is 1 when a bar does not hold."""

from __future__ import annotations

import os
import sys

from benchmarks import (
    against_trl,
    data_plane,
    distill,
    growth,
    layouts,
    learning,
    logprobs,
    memory,
    overhead,
    plan,
    reshard,
    serve_load,
    start,
    weight_sync,
)
from benchmarks.against_trl import others
from benchmarks.episodes import learning as episodes
from benchmarks.gpu import doctor

BENCHMARKS = {
    "learning": learning.main,
    "data_plane": data_plane.main,
    "distill": distill.main,
    "layouts": layouts.main,
    "reshard": reshard.main,
    "weight_sync": weight_sync.main,
    "plan": plan.main,
    "quickstart": against_trl.quickstart,
    "long_tail": against_trl.long_tail,
    "long_tail_bf16": against_trl.long_tail_bf16,
    "online_dpo": others.online_dpo,
    "ppo": others.ppo,
    "logprobs": logprobs.main,
    "overhead": overhead.main,
    "growth": growth.main,
    "start": start.main,
    "memory": memory.main,
    "episodes": episodes.main,
    "serve": serve_load.main,
    "gpu": lambda: doctor.main([]),
}
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
