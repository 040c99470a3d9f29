"""Run by test_parallel.py: trains small models under one layout after the other, in as many processes as each takes.

The processes of every layout are forked from this one, which has imported all there is, so that starting them costs
nothing. One process alone goes first; what it finds (losses, norms, gradients, weights) is what the others are held
against. Prints one JSON object: what each layout is off by.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlcore_grpo import GRPOConfig, grpo_loss
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.room import local_parameters
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import Numerics, UpdateItem
from rlcore.engine.update.micro_batch_size import measure
from rlcore.engine.update.microbatch import update_plan
from rlcore.engines.torch import parameters, state
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.engines.torch.parameters import reshard_fsdp
from rlcore.errors import DataError

spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).parents[2] / "engine_models.py")
engine_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_models)

LR = {"sgd": 0.05, "adamw": 1e-4}
parameters.MESSAGE_ELEMENTS = 5000  # elements, so that whole copies average their gradients in several messages
# 15 rows in groups of 3, so that dp places get unequal shares; then a single row, so that all but one get none.
BATCHES = [
    engine_models.random_batch(5, 3, seed=1),
    engine_models.random_batch(1, 1, seed=2),
    engine_models.random_batch(3, 2, seed=3),
]
ACROSS = "qwen3-tied"
"""The model whose training goes on under another layout."""


@dataclass(frozen=True)
class Case:
    """A model under a layout; `shard` as in the config."""

    model: str
    folder: str
    pp: int
    tp: int
    dp: int
    shard: int

    @property
    def name(self) -> str:
        return f"{self.pp}-{self.tp}-{self.dp}" + (f"-shard{self.shard}" if self.shard else "")


def engine_of(case: Case, rank: int) -> TorchEngine:
    world = case.pp * case.tp * case.dp
    rows = 3 if case.shard else 6  # copies of the weights go through several micro-batches before they add up
    config = EngineConfig(pp=case.pp, tp=case.tp, lr=0.0, clip_grad=0.0, micro_batch_rows=rows)
    engine = TorchEngine(
        TrainSetup(
            ModelConfig(path=case.folder),
            config,
            TorchConfig(shard=case.shard),
            ranks=Ranks(rank, world),
            trains=True,
            total_steps=10,
        )
    )
    whole = case.pp == case.tp == 1 and (case.dp == 1 or case.shard == 1)
    assert (engine.shared_module is not None) == whole, (case.name, engine.shared_module)
    return engine


def step(engine: TorchEngine, batch: Any, on_nonfinite: Any = "stop") -> dict[str, float]:
    place = engine.layout.coordinates(engine.ranks.rank).dp
    rows = update_plan(len(batch), list(batch["uid"]), 1, engine.layout.dp)[place][0]
    config, numerics = GRPOConfig(kl_coef=0.1), Numerics(on_nonfinite=on_nonfinite)
    item = UpdateItem(batch[rows], [len(rows)], grpo_loss, config, keep_together="uid", numerics=numerics)
    return engine.update([item], epochs=1, step=0)


def gradients(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: state.local(parameter.grad).clone() for name, parameter in engine.parameters.named_local()}


def weights(engine: TorchEngine) -> dict[str, Tensor]:
    reshard_fsdp(engine.root)
    return {name: state.local(parameter.detach()).clone() for name, parameter in engine.parameters.named_local()}


def seen(engine: TorchEngine) -> dict[str, Any]:
    """Return all that is compared, of each tensor this rank's part."""
    found: dict[str, Any] = {"start": weights(engine)}
    for number, batch in enumerate(BATCHES[:2]):
        found[f"metrics {number}"] = step(engine, batch)
        found[f"gradients {number}"] = gradients(engine)
    place = engine.layout.coordinates(engine.ranks.rank).dp
    rows = update_plan(len(BATCHES[0]), None, 1, engine.layout.dp)[place][0]
    found["rows"], found["computed"] = rows, engine.compute(BATCHES[0][rows], ["log_probs", "entropy"])
    engine.engine_config = replace(engine.engine_config, clip_grad=0.5)
    reshard_fsdp(engine.root)
    for kind, lr in LR.items():
        for name, parameter in engine.parameters.named_local():
            state.local(parameter.detach()).copy_(found["start"][name])
        engine.engine_config = replace(engine.engine_config, lr=lr)
        groups = engine.parameters.by_mesh()
        made = {"sgd": torch.optim.SGD, "adamw": partial(torch.optim.AdamW, weight_decay=0, fused=True)}
        engine.optimizer = made[kind](groups)  # at the rate of the config
        found[f"{kind} metrics"] = [step(engine, batch) for batch in BATCHES]
        found[kind] = weights(engine)
    full = {name: tensor.clone() for name, tensor in engine.masters()}
    mine = {name: engine.parameters.shard_of(name, full[name]) for name in found["adamw"]}
    found["full"] = list(full) == list(engine.shapes) and same(mine, found["adamw"])
    found["rollout"] = same({name: tensor.clone() for name, tensor in engine.export(torch.float32)}, full)
    found["local"] = local_is_cut(engine, full)
    found["skipped"] = skips(engine)
    return found


def skips(engine: TorchEngine) -> bool:
    """Whether all ranks skip a step in which one row of one rank is NaN, change nothing, and name that row alike."""
    assert engine.optimizer is not None
    batch = BATCHES[0][:]
    advantages = batch["advantages"]
    advantages[7] = torch.nan
    batch["advantages"] = advantages

    def held() -> dict[str, Tensor]:
        moments = [value for each in engine.optimizer.state.values() for value in each.values()]
        return {**weights(engine), **{str(n): state.local(value).clone() for n, value in enumerate(moments)}}

    before, version = held(), engine.version
    metrics = step(engine, batch, "skip")
    unchanged = same(held(), before) and engine.version == version
    counted = (metrics["train/nonfinite_updates"], metrics["train/optimizer_steps"]) == (1, 0)
    try:
        step(engine, batch)
    except DataError as error:
        told = engine.ranks.gather(str(error))
    one_row = f"gradient of term 'policy' is not finite in rows uid={batch['uid'][7]} sample=1; the weights"
    return unchanged and counted and same(held(), before) and len(set(told)) == 1 and one_row in told[0]


def go_on(engine: TorchEngine) -> dict[str, Tensor]:
    engine.offload()  # which on a CPU moves nothing, and must change nothing
    step(engine, BATCHES[0])
    return weights(engine)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], tensor) for name, tensor in want.items())


def local_is_cut(engine: TorchEngine, full: dict[str, Tensor]) -> bool:
    """Whether the local parameters are what `cuts` says of the whole ones, and no other."""
    place, given = engine.layout.coordinates(engine.ranks.rank), dict[str, Tensor]()
    for name, tensor in engine.export_local():
        cut = engine.shard_specs[name]
        want = full[name] if cut.dim is None else full[name].chunk(engine.layout.tp, cut.dim)[place.tp]
        if not torch.equal(tensor, want):
            return False
        given[name] = tensor
    return set(given) == {name for name, cut in engine.shard_specs.items() if place.pp in cut.stages}


def off(engine: TorchEngine, got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest difference of any tensor from the whole ones of one process, relative by norm."""
    squares = {}
    for name, tensor in got.items():
        assert want[name].norm() > 0, f"{name} is all zeros, so the comparison would show nothing"
        cut, mesh = engine.shard_specs[name], engine.mesh
        holders = len(cut.stages) * mesh.copies * (engine.layout.tp if cut.dim is None else 1)
        squares[name] = (tensor - engine.parameters.shard_of(name, want[name])).square().sum().item() / holders
    everyone = engine.ranks.gather(squares)
    total = {name: sum(ranks.get(name, 0.0) for ranks in everyone) for name in want}
    assert {name for ranks in everyone for name in ranks} == set(want)
    return max(total[name] ** 0.5 / want[name].norm().item() for name in want)


def off_metrics(got: dict[str, float], want: dict[str, float]) -> float:
    assert got.keys() == want.keys()
    return max(abs(got[key] - want[key]) / max(abs(want[key]), 1e-3) for key in want)


def compare(engine: TorchEngine, got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    computed = [
        (got["computed"][name][row] - want["computed"][name][at]).abs().max().item()
        for name in want["computed"]
        for row, at in enumerate(got["rows"])
    ]
    parts = {name: engine.parameters.shard_of(name, want["adamw"][name]) for name in got["adamw"]}
    return {
        "metrics": max(off_metrics(got[f"metrics {n}"], want[f"metrics {n}"]) for n in range(2)),
        "gradients": max(off(engine, got[f"gradients {n}"], want[f"gradients {n}"]) for n in range(2)),
        "computed": max(computed, default=0.0),
        "sgd": off(engine, got["sgd"], want["sgd"]),
        "adamw": max((got["adamw"][name] - part).abs().max().item() for name, part in parts.items() if part.numel()),
        **{name: float(got[name]) for name in ("full", "rollout", "local", "skipped")},
    }


def rank_main(rank: int, world: int, port: int, cases: list[Case], folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        for case in cases:
            started = time.perf_counter()
            engine = engine_of(case, rank)
            if world > 1:  # which must change nothing
                measure(engine, lambda run: [run(), 0][1], 512)
                held = sum(engine.ranks.gather(sum(each.numel() for each in weights(engine).values())))
                assert abs(sum(engine.ranks.gather(local_parameters(engine))) - held) < 0.02 * held
            got = seen(engine)
            if case.model == ACROSS:
                engine.save(folder / case.name)
                got["next"] = go_on(engine)
            if world == 1:
                torch.save(got, folder / f"{case.model}.pt")
            want = torch.load(folder / f"{case.model}.pt", weights_only=False)
            report: dict[str, Any] = compare(engine, got, want)
            if case.model == ACROSS:
                report |= across(engine, case, folder, want)
            every = [report]
            if world > 1:
                every = [{}] * world
                dist.all_gather_object(every, report)
            if rank == 0:
                results.put((case, every))
                print(f"{time.perf_counter() - started:6.1f} s {case.model} {case.name}", file=sys.stderr)
        if world > 1:
            dist.destroy_process_group()
    except BaseException:
        results.put((None, f"rank {rank} of {world}: {traceback.format_exc()}"))
        raise


def across(engine: TorchEngine, case: Case, folder: Path, one: dict[str, Any]) -> dict[str, float]:
    """What one process saved goes on here; what was saved here goes on in one, and opens with transformers."""
    engine.restore(folder / "1-1-1")
    report = {"loaded": float(engine.version == 8 and off(engine, weights(engine), one["adamw"]) == 0)}
    again = folder / f"{case.name}-again"
    engine.save(again)
    report["next"] = off(engine, go_on(engine), one["next"])
    if engine.ranks.rank == 0:
        alone = engine_of(replace(case, pp=1, tp=1, dp=1, shard=0), 0)
        alone.engine_config = replace(engine.engine_config, micro_batch_rows=alone.engine_config.micro_batch_rows)
        alone.restore(again)
        report["there and back"] = float(same(go_on(alone), one["next"]))
        alone.restore(folder / case.name)
        report["elsewhere"] = off(alone, go_on(alone), one["next"])
        hf = AutoModelForCausalLM.from_pretrained(again / "model", dtype=torch.float32)
        report["exported"] = float(same(dict(hf.named_parameters()), one["adamw"]))
    return report


def main() -> None:
    """Run `CASES`, a JSON list of [model, folder, pp, tp, dp, shard], with files in FOLDER."""
    cases, folder = [Case(*case) for case in json.loads(sys.argv[1])], Path(sys.argv[2])
    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    for world in sorted({case.pp * case.tp * case.dp for case in cases}):
        mine = [case for case in cases if case.pp * case.tp * case.dp == world]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = context.Queue()
        ranks = [
            context.Process(target=rank_main, args=(rank, world, port, mine, folder, results)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            for _ in mine:
                case, reports = results.get(timeout=240)
                if case is None:
                    sys.exit(reports)
                found[f"{case.model} {case.name}"] = reports
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
