"""One of 4 gloo ranks that train under a layout, generate under another, and compare with one rank and whole weights.

python generating.py RANK WORLD PORT RESULT, then a folder for each of LAYOUTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.rollout import Sampling, Untested
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.weights.fingerprint import checksum, differences
from rlcore.engine.weights.transfer import RemoteWeights, object_column, pack_weights
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.errors import WeightsError
from rlcore.plugins import Role
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import Worker, WorkerContext
from rlcore.workers.worker import construct

LAYOUTS = {"qwen2": [(2, 2, 2), (2, 2, 1), (1, 2, 2), (2, 1, 1)], "llama": [(1, 2, 2), (1, 2, 1)], "qwen3": [(2, 2, 2)]}
"""By model: stages and tensor shards of training, tensor shards of generation; the rest of 4 ranks is dp."""
SAMPLINGS = {"greedy": Sampling(12, temperature=0.0), "sampled": Sampling(12, temperature=0.9, top_p=0.95)}


def rows() -> DataProto:
    """Return 9 rows of 3 prompts of different lengths, and what GRPO's loss reads."""
    generator = torch.Generator().manual_seed(3)
    lengths = [2, 7, 4]
    prompts = [torch.randint(3, 97, (length,), generator=generator) for length in lengths for _ in range(3)]
    responses = Ragged.from_list([torch.randint(3, 97, (5 + row % 4,), generator=generator) for row in range(9)])
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list(prompts),
            "responses": responses,
            "response_mask": responses.with_values(torch.ones_like(responses.values)),
            "old_log_probs": responses.with_values(-4 - torch.rand(len(responses.values), generator=generator)),
            "ref_log_probs": responses.with_values(-4 - torch.rand(len(responses.values), generator=generator)),
            "advantages": torch.randn(9, generator=generator),
            "uid": [f"0:{row // 3}" for row in range(9)],
            "sample_index": torch.arange(3).repeat(3),
        }
    )


def make_worker(
    context: WorkerContext, folder: str, pp: int, tp: int, shards: int, kind: type[Worker] = ModelWorker
) -> Any:
    """Return a started worker that trains as pp x tp x dp and generates with so many tensor shards."""
    setup = RoleSetup(
        Role(trains=True, generates=True),
        ModelConfig(path=folder),
        EngineConfig(pp=pp, tp=tp, lr=1e-2),
        RolloutConfig(tp=shards),
        rlcore_train_engines(),
        rlcore_rollout_engines(),
        TorchConfig(),
        HFConfig(),
        seed=0,
        total_steps=10,
    )
    worker = construct(context, kind, (setup,), {}, {})
    assert isinstance(worker, kind)
    worker.start()
    return worker


def off(worker: ModelWorker, plain: HFRollout) -> dict[str, float]:
    """Return how far responses are from those of an engine with whole weights: tokens apart, and log-probs by most."""
    asked = rows().select(["prompts", "sample_index"], ["uid"])
    apart, most = 0, 0.0
    for sampling in SAMPLINGS.values():
        got = worker.generate(asked, sampling)
        want = plain.generate(asked, sampling)
        apart += not got["responses"].equal(want["responses"])
        if not apart:
            difference = got["rollout_log_probs"].values - want["rollout_log_probs"].values
            most = max(most, float(difference.abs().max()))
    return {"apart": apart, "log_probs": most}


def wrong_weights(worker: ModelWorker, shards: int) -> list[str]:
    """Return the parameters that generate and are not, bit for bit, parts of the fully gathered ones."""
    assert isinstance(worker.rollout, HFRollout)
    held = dict(worker.rollout.hf.named_parameters())
    index = worker.rollout._shards._index if shards > 1 else 0
    bad = []
    for name, whole in worker.train.export(torch.float32):
        dim = worker.train.shard_specs[name].dim
        part = whole if dim is None or shards == 1 else whole.chunk(shards, dim)[index]
        if not torch.equal(held.pop(name), part):
            bad.append(name)
    return bad + list(held)


def compare(context: WorkerContext, folder: str, pp: int, tp: int, shards: int, tried: bool) -> dict:
    """Generate before and after each of two updates, and compare each time. `tried`: the first weights have a trial."""
    worker = make_worker(context, folder, pp, tp, shards)
    want_trial(worker, tried)
    plain = HFRollout(ModelConfig(path=folder), batch_size=64, device=torch.device("cpu"), shared=None)
    found: dict = {"layout": [pp, tp, shards], "rounds": []}
    for step in range(3):
        if step:
            worker.update([UpdateItem(rows(), [9], grpo_loss, GRPOConfig())], 1, step)
        plain.sync(worker.train.export(torch.float32), worker.train.version, worker.train.shapes)
        figures = off(worker, plain)
        found["rounds"].append({**figures, "wrong": wrong_weights(worker, shards), "version": worker.rollout.version})
    kept = worker.switch_bytes()
    found["held"], found["parameters"] = kept["held"], sum(p.nbytes for p in worker.rollout.hf.parameters())
    whole = worker.train.shapes
    divided = [torch.Size(whole[name]).numel() for name, cut in worker.train.shard_specs.items() if cut.dim is not None]
    found["unequal"] = unequal_fingerprints(worker)
    found["received"], found["divided"] = kept["received"] / len(found["rounds"]), 4 * sum(divided)
    found["refusal"] = refusal(worker)
    found["trial"] = failed_trial(worker) if tried else None
    return found


def want_trial(worker: ModelWorker, wanted: bool) -> None:
    assert worker.rollout is not None
    assert worker.route is not None
    worker.rollout.untested = Untested("engine 9", "engine 7")
    worker.route._trial_due = wanted


def failed_trial(worker: ModelWorker) -> str:
    """Return the error of a trial in which rank 0 alone has other log-probs."""
    assert worker.rollout is not None
    generate = worker.rollout.generate

    def colder(batch: DataProto, sampling: Sampling) -> DataProto:
        out = generate(batch, sampling)
        out["rollout_log_probs"] = out.view("rollout_log_probs").map(lambda values: values - int(worker.rank == 0))
        return out

    worker.rollout.generate = colder  # type: ignore[method-assign]
    want_trial(worker, True)
    worker.train.version += 1
    try:
        worker.generate(rows().select(["prompts", "sample_index"], ["uid"]), SAMPLINGS["greedy"])
    except WeightsError as error:
        return str(error)
    return ""


def unequal_fingerprints(worker: ModelWorker) -> list[str]:
    """Return the parameters whose checksum, made of shards, is not that of the whole parameter, in fp32 and bf16."""
    bad = []
    for dtype in (torch.float32, torch.bfloat16):
        found = worker.train.fingerprint(dtype)
        bad += [name for name, whole in worker.train.export(dtype) if found.pop(name) != checksum(whole)] + list(found)
    return bad


def refusal(worker: ModelWorker) -> str:
    """Return the error of a switch in which rank 0 got two rows of a parameter in the wrong order."""
    gather = worker.route._reshard.gather

    def swapped(shards: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shard in gather(shards):
            if worker.rank == 0 and name.endswith("1.mlp.up_proj.weight"):
                shard[:2] = shard[:2].flip(0)
            yield name, shard

    worker.route._reshard.gather = swapped  # type: ignore[method-assign]
    worker.train.version += 1
    worker.route._switches = 0
    try:
        worker.generate(rows().select(["prompts", "sample_index"], ["uid"]), SAMPLINGS["greedy"])
    except WeightsError as error:
        return str(error)
    return ""


def copy(context: WorkerContext, folder: str) -> dict:
    """Generate tensor-parallel as a copy that is sent whole weights."""
    trained = make_worker(context, folder, 1, 2, 2)
    worker = make_worker(context, folder, 1, 1, 2, SamplingWorker)
    plain = HFRollout(ModelConfig(path=folder), batch_size=64, device=torch.device("cpu"), shared=None)
    train = trained.train
    sent = pack_weights(list(train.shapes), train.export(torch.float32), train.shapes, torch.float32, 7)
    expected = train.fingerprint(torch.float32)
    sent["checksum"] = object_column(list(expected.values()))
    worker.take_weights(sent)
    plain.sync(iter(RemoteWeights(sent).items()), 7, trained.train.shapes)
    found = {**off(worker, plain), "version": worker.rollout.version}
    held = dict(worker.rollout.hf.named_parameters())
    if worker.rank == 1:
        held["model.layers.0.self_attn.o_proj.weight"].data[0, 0] += 1
    found["differ"] = differences(worker.rollout.fingerprint(), expected)
    return found


def main(rank: int, world: int, port: int, result: str, folders: list[str]) -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    context = WorkerContext("actor", rank, world, rank, "here", master=("127.0.0.1", port))
    pairs = list(zip(LAYOUTS, folders, strict=True))
    cases = [
        {"model": kind, **compare(context, folder, *layout, tried=kind != "qwen3")}
        for kind, folder in pairs
        for layout in LAYOUTS[kind]
    ]
    found = {"cases": cases, "copy": copy(context, folders[0])}
    everyone: list = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(result).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
