"""Run by test_adapter_layouts.py: trains an adapter under one layout after the other, in as many processes as it takes.

Prints a JSON object: by layout, what its first rank found. The arguments are a model folder and a folder for states.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import socket
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlcore_grpo import GRPOConfig, grpo_loss
from safetensors.torch import load_file

from rlcore.adapter_folder import SETTINGS, WEIGHTS
from rlcore.config import EngineConfig, LoraConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.room import local_parameters
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.microbatch import update_plan
from rlcore.engines.torch import state
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine

spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).parents[2] / "engine_models.py")
engine_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_models)

LAYOUTS = {"one": (1, 1, 1, 0), "shards": (1, 1, 2, 0), "copies": (1, 1, 2, 1), "stages": (2, 1, 1, 0)}
LAYOUTS |= {"tensor": (1, 2, 1, 0)}
"""By name: engine.pp, engine.tp, data-parallel ranks, engine.torch.shard."""
SOME = ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj", "layers.1.mlp.up_proj"]
BATCHES = [engine_models.random_batch(5, 3, seed=1), engine_models.random_batch(3, 2, seed=3)]


def engine_of(
    model: str, layout: tuple[int, int, int, int], rank: int, dtype: Any = "fp32", **lora: Any
) -> TorchEngine:
    pp, tp, dp, shard = layout
    engine = TorchEngine(
        TrainSetup(
            ModelConfig(path=model, dtype=dtype, lora=LoraConfig(rank=4, **lora)),
            EngineConfig(pp=pp, tp=tp, lr=1e-2, clip_grad=0.5, micro_batch_rows=6),
            TorchConfig(shard=shard),
            ranks=Ranks(rank, pp * tp * dp),
            trains=True,
            total_steps=10,
            seed=5,
        )
    )
    with torch.no_grad():  # else the first gradients of A are 0
        for name, parameter in engine.parameters.named_local():
            if name.endswith("lora_b"):
                drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = 0.1 * torch.randn(engine.parameters.shapes[name], generator=drawn)
                state.local(parameter).copy_(engine.parameters.shard_of(name, whole))
    return engine


def step(engine: TorchEngine, batch: Any) -> dict[str, float]:
    place = engine.layout.coordinates(engine.ranks.rank).dp
    rows = update_plan(len(batch), list(batch["uid"]), 1, engine.layout.dp)[place][0]
    item = UpdateItem(batch[rows], [len(rows)], grpo_loss, GRPOConfig(kl_coef=0.1), keep_together="uid")
    return engine.update([item], epochs=1, step=0)


def merged(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export(torch.float32)}


def off(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).norm() / want[name].norm()) for name in want)


def measure(model: str, name: str, rank: int, folder: Path) -> dict[str, Any]:
    engine = engine_of(model, LAYOUTS[name], rank)
    found: dict[str, Any] = {"metrics": [step(engine, batch) for batch in BATCHES]}
    whole = merged(engine)
    local = {name: shard.clone() for name, shard in engine.export_local()}
    place = engine.layout.coordinates(rank).pp
    own = {name: spec for name, spec in engine.shard_specs.items() if place in spec.stages}
    cut = {
        name: whole[name].chunk(engine.layout.tp, spec.dim)[engine.layout.coordinates(rank).tp]
        if spec.dim is not None
        else whole[name]
        for name, spec in own.items()
    }
    found["local"] = set(local) == set(own) and all(torch.allclose(local[name], cut[name], atol=1e-6) for name in own)
    sums = engine.fingerprint(torch.float32)
    engine.save(folder / name)
    reference = engine.without_adapter()
    found["reference"] = reference.compute(BATCHES[0], ["log_probs"])["log_probs"].values.tolist()
    found["trained"] = sum(engine.ranks.gather(local_parameters(engine))) / (
        engine.layout.dp if LAYOUTS[name][3] else 1
    )
    if name == "one":
        torch.save({"whole": whole, "sums": sums}, folder / "one.pt")
    want = torch.load(folder / "one.pt", weights_only=True)
    found["weights"] = off(whole, want["whole"])
    engine.restore(folder / "one")  # saved by one process
    found["restored"] = off(merged(engine), want["whole"])
    found["restored sums"] = engine.fingerprint(torch.float32) == want["sums"]
    found["next"] = step(engine, BATCHES[0])
    saved = load_file(folder / name / "model" / WEIGHTS)
    found["file"] = sum(each.numel() for each in saved.values())
    found["targets"] = json.loads((folder / name / "model" / SETTINGS).read_text())["target_modules"]
    if LAYOUTS[name][0] == 1:  # each layout rounds the base to bf16 in its own way
        rounded = engine_of(model, LAYOUTS[name], rank, dtype="bf16", targets=SOME)
        rounded.save(folder / f"{name}-bf16")
        rounded.restore(folder / "one-bf16")
    return found


def rank_main(model: str, name: str, rank: int, world: int, port: int, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        found = measure(model, name, rank, folder)
        if rank == 0:
            results.put(found)
    except BaseException:
        results.put(f"{name}, rank {rank}: {traceback.format_exc()}")
        raise


def main() -> None:
    """Run all layouts."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    context, found = multiprocessing.get_context("fork"), {}
    for name, (pp, tp, dp, _) in LAYOUTS.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results, world = context.Queue(), pp * tp * dp
        ranks = [
            context.Process(target=rank_main, args=(model, name, rank, world, port, folder, results))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            found[name] = results.get(timeout=120)
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
        if isinstance(found[name], str):
            sys.exit(found[name])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
