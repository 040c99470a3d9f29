"""One of the gloo ranks that reshard under every layout, by every strategy in turn, and check each weight bit for bit.

python ranks.py RANK WORLD STORE RESULT WIDTH ROUNDS

Rank 0 writes what all ranks found as JSON. The benchmark runs this, and so do the tests of resharding.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import LAYOUTS
from strategies import STRATEGIES, ConsecutiveGroups, flat_pieces
from torch import Tensor

from rlcore.engine.parallel.layout import Layout, ShardSpec
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import ProcessGroups

LAYERS, VOCABULARY = 4, 300


def decoder_cuts(width: int, stages: int) -> dict[str, ShardSpec]:
    """Return how Llama-shaped layers with grouped queries are cut: what tensor ranks divide, stages of equal size."""
    cuts = {}
    for layer in range(LAYERS):
        at = (layer * stages // LAYERS,)
        for name, shape, dim in [
            ("self_attn.q_proj.weight", (width, width), 0),
            ("self_attn.q_proj.bias", (width,), 0),
            ("self_attn.k_proj.weight", (width // 2, width), 0),
            ("self_attn.v_proj.weight", (width // 2, width), 0),
            ("self_attn.o_proj.weight", (width, width), 1),
            ("mlp.gate_proj.weight", (3 * width, width), 0),
            ("mlp.up_proj.weight", (3 * width, width), 0),
            ("mlp.down_proj.weight", (width, 3 * width), 1),
        ]:
            cuts[f"model.layers.{layer}.{name}"] = ShardSpec(shape, at, dim)
    return cuts


def other_cuts(width: int, stages: int) -> dict[str, ShardSpec]:
    """Return how the rest is cut: whole on its stages, and tied embeddings, which are on two."""
    ends = tuple(sorted({0, stages - 1}))
    norms = {
        f"model.layers.{layer}.input_layernorm.weight": ShardSpec((width,), (layer * stages // LAYERS,))
        for layer in range(LAYERS)
    }
    return {"model.embed_tokens.weight": ShardSpec((VOCABULARY, width), ends), **norms}


@cache
def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def whole(name: str, cut: ShardSpec, version: int) -> Tensor:
    """Return a parameter as it is after some updates, the same on every rank."""
    return _initial(name, cut.shape) + version


def part(tensor: Tensor, cut: ShardSpec, index: int, count: int) -> Tensor:
    """Return the index-th of `count` slices along the cut dimension."""
    return tensor if cut.dim is None else tensor.chunk(count, cut.dim)[index]


def training_shards(
    strategy: str, layout: GenerationLayout, cuts: Mapping[str, ShardSpec], version: int
) -> dict[str, Tensor]:
    """Return this rank's shards, in memory of their own, as the strategy's column presupposes."""
    rank, training = dist.get_rank(), layout.training
    at = training.coordinates(rank)
    shards = {}
    for name, cut in cuts.items():
        full = whole(name, cut, version)
        if strategy == "all_ranks":
            run = flat_pieces(full.numel(), range(training.world_size))[rank]
            shards[name] = full.flatten()[run.start : run.stop].clone()
        elif at.pp in cut.stages:
            shards[name] = part(full, cut, at.tp, training.tp).clone()
    return shards


def wrong(
    found: Iterable[tuple[str, Tensor]], layout: GenerationLayout, cuts: Mapping[str, ShardSpec], version: int
) -> list[str]:
    """Return the names whose generating shard is not, bit for bit, its part of the whole; and those that lack."""
    at = layout.coordinates(dist.get_rank())
    stages = layout.stages(dist.get_rank())
    bad, seen = [], set()
    for name, shard in found:
        seen.add(name)
        if not torch.equal(shard, part(whole(name, cuts[name], version), cuts[name], at.tp, layout.tp)):
            bad.append(name)
    wanted = {name for name, cut in cuts.items() if any(stage in stages for stage in cut.stages)}
    return bad + sorted(wanted - seen)


def kernel_bytes() -> int:
    """Return what the kernel has received on all TCP connections of this process (tcpi_bytes_received)."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, 128)[0]
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return total


def measure(
    layout: GenerationLayout, cuts: Mapping[str, ShardSpec], groups: ProcessGroups, rounds: int
) -> dict[str, dict]:
    """Reshard so many times, each after an update, by every strategy in turn; return the figures of each.

    Bytes are those of the last time, all being alike. The strategies beside HybridFlow's have the vanilla grouping.
    """
    consecutive = ConsecutiveGroups(layout.training, layout.pp, layout.tp)
    layouts = {name: layout if name == "hybridflow" else consecutive for name in STRATEGIES}
    reshards = {name: STRATEGIES[name](layouts[name], cuts, groups, bucket_bytes=2**22) for name in STRATEGIES}
    figures: dict[str, dict] = {name: {"seconds": [], "wrong": []} for name in STRATEGIES}
    for version in range(rounds):
        for name, reshard in reshards.items():
            shards = training_shards(name, layout, cuts, version)
            reshard.meter.received = reshard.meter.copied = 0
            dist.barrier()
            kernel, start = kernel_bytes(), time.perf_counter()
            found = list(reshard.gather(shards.items()))
            dist.barrier()
            figures[name]["seconds"].append(time.perf_counter() - start)
            figures[name]["wrong"] += wrong(found, layouts[name], cuts, version)
            figures[name] |= {
                "kernel": kernel_bytes() - kernel,
                "received": reshard.meter.received,
                "copied": reshard.meter.copied,
                "peak": reshard.meter.peak,
                "redundant": reshard.redundant_bytes(shards),
            }
    for name, reshard in reshards.items():
        reshard.release()
        figures[name]["held"] = reshard.meter.held
    return figures


def run(width: int, rounds: int, groups: ProcessGroups) -> dict[str, Any]:
    """Run all cases and return what this rank found."""
    found: dict[str, Any] = {"layouts": [], "others": []}
    for pp, tp, dp, stages, shards in LAYOUTS:
        training = Layout(pp, tp, dp)
        layout = GenerationLayout(training, stages, shards)
        numbers = {"layout": [pp, tp, dp, stages, shards]}
        found["layouts"].append(numbers | measure(layout, decoder_cuts(width, training.pp), groups, rounds))
        found["others"].append(numbers | measure(layout, other_cuts(width, training.pp), groups, 1))
    return found


def main(rank: int, world: int, store: str, result: str, width: int, rounds: int) -> None:
    """Join the other ranks, run all cases, and have rank 0 write them down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, run(width, rounds, ProcessGroups(rank)))
    if rank == 0:
        Path(result).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
