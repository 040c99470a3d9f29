"""Weights on their way from the workers that train to a pool that samples, through Ray; against gloo's broadcast."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks.models import write_llama
from benchmarks.report import Benchmark, Figure

POOLS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Workers that train, and that sample."""
ROUNDS = 6
"""The first connects the processes and is not timed."""
BENCHMARK = Benchmark(
    "weight_sync",
    measures=(
        *("rlcore/engine", "rlcore/engines/hf", "rlcore/engines/torch", "rlcore/roles/weight_exporter.py"),
        *("rlcore/workers", "rlcore/protocol"),
        *("benchmarks/weight_sync.py", "benchmarks/weight_sync_sides.py", "benchmarks/models.py"),
    ),
)
NOTES = """\
A Llama of 8 layers, hidden 512, in fp32: M = {m:.0f} MiB, which is sent and loaded whole in every round, on one machine
of {cores} cores with one thread a process. The actor's ranks (FSDP2 shards where there are two) gather layer by layer,
each packs its share of the parameters, and the workers of the other pool read them from Ray's shared memory, one
parameter after the other, into the rollout engine's. Seconds: from the call until the last worker has loaded. The peer
is torch.distributed's own broadcast of parameters of the same shapes, one after the other, from rank 0 of a gloo group
with one process more than there are samplers; it gathers, packs and loads nothing, and no rank may do anything else
meanwhile."""


def main() -> bool:
    """Measure every pair of pools and write the results."""
    from benchmarks.weight_sync_sides import by_broadcast, by_rlcore

    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        shapes = write_llama(Path(folder))
        for trained, sampling in POOLS:
            name = f"{trained} to {sampling}"
            ours = Figure("rlcore", name, "s", by_rlcore(Path(folder), trained, sampling))
            peer = Figure("gloo broadcast", name, "s", by_broadcast(shapes, sampling))
            figures += [ours, peer]
    mebibytes = sum(shape.numel() for shape in shapes) * 4 / 2**20
    notes = NOTES.format(m=mebibytes, cores=os.cpu_count())
    return BENCHMARK.write(figures, [], notes)
