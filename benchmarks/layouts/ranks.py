"""One rank of the benchmark of training layouts: takes steps under each of several, and says what they cost."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.microbatch import update_plan
from rlcore.engines.torch import state
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.protocol import DataProto, Ragged

PROMPTS, SAMPLES, PROMPT, RESPONSE = 4, 4, 16, 48


def rows() -> DataProto:
    """Return the batch of every step: 16 rows of 64 tokens."""
    count = PROMPTS * SAMPLES
    numbers = torch.Generator().manual_seed(0)
    columns: dict[str, Any] = {
        "prompts": [torch.randint(3, 90, (PROMPT,), generator=numbers) for _ in range(count)],
        "responses": [torch.randint(3, 90, (RESPONSE,), generator=numbers) for _ in range(count)],
        "response_mask": [torch.ones(RESPONSE, dtype=torch.int64)] * count,
        "old_log_probs": [torch.full((RESPONSE,), -4.5)] * count,
    }
    batch = DataProto.from_single_dict({name: Ragged.from_list(column) for name, column in columns.items()})
    batch["advantages"] = torch.randn(count, generator=numbers)
    return batch


def received() -> int:
    """Return the bytes that came in over the loopback since the machine started."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])


def held(engine: TorchEngine) -> int:
    """Return the bytes of this rank's weights and moments, in fp32, and as many for gradients as for weights."""
    assert engine.optimizer is not None
    weights = sum(state.local(parameter).nbytes for _, parameter in engine.parameters.named_local())
    tensors = [value for each in engine.optimizer.state.values() for value in each.values() if value.dim() > 0]
    return 2 * weights + sum(state.local(tensor).nbytes for tensor in tensors)


def measure(folder: str, layout: list[int], rounds: int) -> dict[str, Any]:
    """Return what this rank holds, and of all ranks the seconds and bytes of each step but the first."""
    pp, tp, dp, shard = layout
    config = EngineConfig(pp=pp, tp=tp, lr=1e-4, micro_batch_rows=4)
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    engine = TorchEngine(
        TrainSetup(ModelConfig(path=folder), config, TorchConfig(shard=shard), ranks=ranks, trains=True, total_steps=10)
    )
    batch = rows()
    mine = update_plan(len(batch), None, 1, dp)[engine.layout.coordinates(ranks.rank).dp][0]
    seconds, sent = [], []
    for step in range(rounds):
        dist.barrier()
        before, start = received(), time.perf_counter()
        engine.update([UpdateItem(batch[mine], [len(mine)], grpo_loss, GRPOConfig(kl_coef=0.0))], epochs=1, step=step)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append(received() - before)
    return {"layout": layout, "held": held(engine), "seconds": seconds[1:], "sent": sent[1:]}


def main() -> None:
    """Measure LAYOUTS of the model in FOLDER as rank RANK of WORLD; rank 0 writes what each rank found to RESULT."""
    rank, world, store, result, folder, rounds = sys.argv[1:7]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    found = [measure(folder, layout, int(rounds)) for layout in json.loads(sys.argv[7])]
    everyone: list[Any] = [None] * int(world)
    dist.all_gather_object(everyone, found)
    if rank == "0":
        Path(result).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
