"""One of the gloo ranks whose actors (ModelWorker) train a step and switch their weights to generation.

python live.py RANK WORLD PORT RESULT FOLDER ROUNDS

Rank 0 writes the counts of all ranks as JSON. The meter is the one that a run's switch counts with.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import LIVE
from ranks import kernel_bytes
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore import Role
from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.worker import ModelWorker, RoleSetup
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import WorkerContext
from rlcore.workers.worker import construct


def rows() -> DataProto:
    """Return 8 rows, and the columns that GRPO's loss reads."""
    generator = torch.Generator().manual_seed(3)
    responses = Ragged.from_list([torch.randint(3, 80, (5,), generator=generator) for _ in range(8)])
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([torch.randint(3, 80, (4,), generator=generator) for _ in range(8)]),
            "responses": responses,
            "response_mask": responses.with_values(torch.ones_like(responses.values)),
            "old_log_probs": responses.with_values(-4 - torch.rand(len(responses.values), generator=generator)),
            "advantages": torch.randn(8, generator=generator),
        }
    )


def make_actor(context: WorkerContext, folder: str, layout: tuple[int, ...]) -> ModelWorker:
    """Return a started actor under a layout."""
    p, t, _, shards, shard = layout
    setup = RoleSetup(
        Role(trains=True, generates=True),
        ModelConfig(path=folder),
        EngineConfig(name="torch", pp=p, tp=t, lr=1e-3),
        RolloutConfig(name="hf", tp=shards),
        rlcore_train_engines(),
        rlcore_rollout_engines(),
        TorchConfig(shard=shard),
        HFConfig(),
        seed=0,
        total_steps=10,
    )
    actor = construct(context, ModelWorker, (setup,), {}, {})
    assert isinstance(actor, ModelWorker)
    actor.start()
    return actor


def wrong(actor: ModelWorker, shards: int) -> list[str]:
    """Return the parameters that generate and are not, bit for bit, this rank's parts of the trained ones."""
    assert actor.rollout is not None
    held = dict(actor.rollout.hf.named_parameters())  # type: ignore[attr-defined]
    index = dist.get_rank() % actor.train.layout.tp // (actor.train.layout.tp // shards)
    bad = []
    for name, whole in actor.train.export(torch.float32):
        dim = actor.train.shard_specs[name].dim
        part = whole if dim is None or shards == 1 else whole.chunk(shards, dim)[index]
        if not torch.equal(held.pop(name), part):
            bad.append(name)
    return bad + list(held)


def sizes(actor: ModelWorker, shard: int) -> dict[str, int]:
    """Return the bytes that the layout divides (M), those that it does not, and of these the ones on other stages.

    `training_shard`: the bytes of the weights that this rank's optimizer steps, by the layout alone.
    """
    here = actor.train.layout.coordinates(dist.get_rank()).pp
    found = {"divided": 0, "undivided": 0, "undivided_elsewhere": 0}
    for cut in actor.train.shard_specs.values():
        size = 4 * torch.Size(cut.shape).numel()
        if cut.dim is not None:
            found["divided"] += size
            continue
        found["undivided"] += size
        found["undivided_elsewhere"] += 0 if here in cut.stages else size
    layout = actor.train.layout
    own = found["divided"] // (layout.pp * layout.tp) + found["undivided"] - found["undivided_elsewhere"]
    return {**found, "training_shard": own // (1 if shard == 1 else layout.dp)}


def measure(context: WorkerContext, folder: str, layout: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Train a step and switch, several times; return the bytes of the last switch and the seconds of each."""
    actor = make_actor(context, folder, layout)
    batch, found = rows(), {"layout": layout, "seconds": [], "wrong": [], **sizes(actor, layout[4])}
    assert actor.route is not None
    for step in range(rounds):
        actor.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig(kl_coef=0.0))], 1, step)
        before = actor.switch_bytes()
        dist.barrier()
        kernel, start = kernel_bytes(), time.perf_counter()
        actor.route.bring()
        dist.barrier()
        found["seconds"].append(time.perf_counter() - start)
        found["kernel"] = kernel_bytes() - kernel
        after = actor.switch_bytes()
        found |= {key: after[key] - before[key] for key in ("received", "copied")}
        found |= {key: after[key] for key in ("peak", "redundant")}
        found["wrong"] += wrong(actor, layout[3])
    return found


def main(rank: int, world: int, port: int, result: str, folder: str, rounds: int) -> None:
    """Run all layouts."""
    torch.set_num_threads(1)
    context = WorkerContext("actor", rank, world, rank, "here", master=("127.0.0.1", port))
    found = [measure(context, folder, layout, rounds) for layout in LIVE]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(result).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]))
