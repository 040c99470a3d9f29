"""What an adapter learns and costs beside full training: the quickstart by rank, and the seconds of an update."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from benchmarks.learning import train
from benchmarks.report import GRPO, Benchmark, Figure, at_least, at_most
from rlcore import DataProto, Ragged
from rlcore.config import EngineConfig, LoraConfig, ModelConfig
from rlcore.engine import Ranks, TrainEngine, TrainSetup, UpdateItem
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine

LR = 3e-3
"""The adapters' learning rate."""
GAINS = {8: at_least("rank 8: gain, share of full training's", 0.9), 32: at_least("rank 32: gain, share", 0.97)}
SECONDS = at_most("rank 8: seconds of an update, share of full training's", 0.87)
BENCHMARK = Benchmark(
    "lora",
    measures=(*GRPO, "rlcore/engine/adapter.py", "configs/experiment/quickstart.yaml", "benchmarks/lora.py"),
    bars=(*GAINS.values(), SECONDS),
)
NOTES = f"""\
`rlcore train experiment=quickstart cluster=in_process` with seed 0, with all weights at the experiment's own learning
rate, and with model.lora.rank=8 and 32 at engine.lr={LR}: sampled held-out accuracy. Gain: after less before. Updates:
GRPO's loss on 64 rows of 32 prompt and 32 response tokens with the tiny model on one thread, in turn on both sides."""
ROUNDS = 15


def _engine(rank: int) -> TrainEngine:
    model = ModelConfig(lora=LoraConfig(rank=rank))
    return TorchEngine(TrainSetup(model, EngineConfig(lr=1e-5), TorchConfig(), Ranks(), trains=True, total_steps=100))


def _batch() -> DataProto:
    drawn = torch.Generator().manual_seed(0)
    prompts, responses = (Ragged.from_list(list(torch.randint(3, 300, (64, 32), generator=drawn))) for _ in range(2))
    ones = torch.ones_like(responses.values)
    return DataProto.from_single_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": responses.with_values(ones),
            "old_log_probs": responses.with_values(-5.0 * ones.float()),
            "advantages": torch.randn(64, generator=drawn),
            "uid": [f"0:{row // 8}" for row in range(64)],
            "sample_index": torch.arange(8).repeat(8),
        }
    )


def update_seconds() -> dict[str, list[float]]:
    """Return the seconds of updates, in turn with all weights and with an adapter of rank 8."""
    torch.set_num_threads(1)
    engines = {"all weights": _engine(0), "rank 8": _engine(8)}
    item = UpdateItem(_batch(), [64], grpo_loss, GRPOConfig(kl_coef=0.0), keep_together="uid")
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(ROUNDS + 2):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.update([item], epochs=1, step=0)
            if turn >= 2:  # the first ones are slower
                found[name].append(time.perf_counter() - began)
    return found


def main() -> bool:
    """Train by rank, measure updates, and write the results."""
    sides = {"all weights": (), **{f"rank {rank}": (f"model.lora.rank={rank}", f"engine.lr={LR}") for rank in GAINS}}
    figures, gains = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in sides.items():
            run = train("quickstart", 0, Path(folder) / name.replace(" ", "-"), "cluster=in_process", *overrides)
            gains[name] = run["accuracy_after"] - run["accuracy_before"]
            for key in ("accuracy_before", "accuracy_after", "train_seconds"):
                unit = "s" if key == "train_seconds" else "share of samples"
                figures.append(Figure(name, key.replace("_", " "), unit, [run[key]]))
    seconds = update_seconds()
    figures += [Figure(name, "update", "s", values) for name, values in seconds.items()]
    full, adapter = (statistics.median(values) for values in seconds.values())
    bars = [bar.at(gains[f"rank {rank}"] / gains["all weights"]) for rank, bar in GAINS.items()]
    return BENCHMARK.write(figures, [*bars, SECONDS.at(adapter / full)], NOTES)
