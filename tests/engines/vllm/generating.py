"""Gloo ranks that train under a layout, and generate with vLLM tensor-parallel in the same processes.

python generating.py FOLDER CASES, where CASES is JSON: a list of the arguments of `compare` for each number of ranks.
All ranks are forks of one process, as importing vLLM takes longer than all they do.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen2
import vllm.v1.worker.cpu_worker  # noqa: F401
from rlcore_grpo import GRPOConfig, grpo_loss
from transformers import AutoModelForCausalLM
from vllm import LLM  # noqa: F401
from vllm.distributed import get_tp_group

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.rollout import Sampling
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.weights.fingerprint import differences
from rlcore.engine.weights.transfer import pack_weights
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.engines.vllm.plugin import rlcore_rollout_engines
from rlcore.errors import DataError
from rlcore.plugins import Role
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import Worker, WorkerContext
from rlcore.workers.worker import construct

LENGTHS = [5, 20, 190]  # the last is more than a block of vLLM's prefix cache
GREEDY, SAMPLED = Sampling(12, temperature=0.0), Sampling(12)


def rows() -> DataProto:
    """Return 6 rows of 3 prompts, and what GRPO's loss reads."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 300, (length,), generator=generator) for length in LENGTHS for _ in range(2)]
    responses = Ragged.from_list([torch.randint(5, 300, (5 + row % 3,), generator=generator) for row in range(6)])
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list(prompts),
            "responses": responses,
            "response_mask": responses.with_values(torch.ones_like(responses.values)),
            "old_log_probs": responses.with_values(-5 - torch.rand(len(responses.values), generator=generator)),
            "ref_log_probs": responses.with_values(-5 - torch.rand(len(responses.values), generator=generator)),
            "advantages": torch.randn(6, generator=generator),
            "uid": [f"0:{row // 2}" for row in range(6)],
            "sample_index": torch.arange(2).repeat(3),
        }
    )


def make_worker(
    context: WorkerContext,
    folder: str,
    tp: int,
    shards: int,
    lr: float,
    *,
    generates: bool = True,
    kind: type[Worker] = ModelWorker,
) -> Any:
    """Return a started worker that trains with `tp` tensor shards and generates, if it does, with `shards`."""
    setup = RoleSetup(
        Role(trains=True, generates=generates),
        ModelConfig(path=folder),
        EngineConfig(tp=tp, lr=lr),
        RolloutConfig(name="vllm", tp=shards),
        rlcore_train_engines(),
        rlcore_rollout_engines(),
        TorchConfig(),
        VLLMConfig(memory=32),
        seed=0,
        total_steps=10,
    )
    worker = construct(context, kind, (setup,), {}, {})
    assert isinstance(worker, kind)
    worker.start()
    return worker


def tokens(out: DataProto) -> list[list[int]]:
    return [row.tolist() for row in out["responses"].to_list()]


def answers(worker: ModelWorker, hf: torch.nn.Module) -> dict:
    """Return what vLLM answers, transformers' greedy tokens, and how far the log-probs of samples are from its own."""
    asked = rows().select(["prompts", "sample_index"], ["uid"])
    greedy, sampled = worker.generate(asked, GREEDY), worker.generate(asked, SAMPLED)
    expected, gap = [], 0.0
    for row, prompt in enumerate(asked["prompts"].to_list()):
        ids, response = prompt[None], sampled["responses"][row]
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        expected.append(out[0, len(prompt) :].tolist())
        with torch.no_grad():
            logits = hf(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        gap = max(gap, float((own - sampled["rollout_log_probs"][row]).abs().max()))
    return {
        "greedy": tokens(greedy),
        "expected": expected,
        "sampled": tokens(sampled),
        "gap": gap,
        "versions": sorted(set(greedy["weights_version"].tolist())),
    }


def refusals(worker: ModelWorker) -> dict:
    """Return what becomes of an update that lacks a shard, and of one that breaks off."""
    asked = rows().select(["prompts", "sample_index"], ["uid"])
    assert worker.rollout is not None
    before, found = tokens(worker.generate(asked, GREEDY)), {}
    shapes = dict(worker.rollout.shard_shapes)
    whole = {name: torch.zeros(shape) for name, shape in worker.rollout.shapes.items()}
    for name, wrong in {
        "missing": {name: shape for name, shape in shapes.items() if "layers.1.self_attn.k_proj" not in name},
        "whole": {name: tuple(tensor.shape) for name, tensor in whole.items()},
    }.items():
        try:
            worker.rollout.adopt(iter(whole.items()), 9, wrong)
        except DataError as error:
            found[name] = str(error)
    found["kept"] = tokens(worker.generate(asked, GREEDY)) == before
    try:
        shards = {name: torch.zeros(shape) for name, shape in shapes.items()}
        worker.rollout.adopt(iter(list(shards.items())[:-1]), 9, shapes)
    except DataError as error:
        found["broken"] = str(error)
    try:
        worker.rollout.generate(asked, GREEDY)
    except DataError as error:
        found["after"] = str(error)
    found["mended"] = tokens(worker.generate(asked, GREEDY)) == before  # with a sync before, as the version says
    return found


def take(hf: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give transformers' model the weights."""
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights


def shared_memory() -> list[str]:
    """Return what of this tensor group's shared memory would stay if its processes were killed.

    vLLM's build for processors without AVX512 has none: its ranks then talk through torch.distributed.
    """
    dist.barrier()
    group = get_tp_group()
    assert group.mq_broadcaster is None
    channel = group.device_communicator.dist_module
    if channel is dist:
        assert not hasattr(torch.ops._C, "init_shm_manager")
        return []
    name = channel.group_name
    return [file.name for file in Path("/dev/shm").iterdir() if file.name.startswith(name)]


def compare(context: WorkerContext, folder: str, tp: int, shards: int, lr: float, copy: bool = False) -> dict:
    """Generate before and after an update, in the processes that train or as a copy that is sent whole weights."""
    trained = worker = make_worker(context, folder, tp, shards, lr, generates=not copy)
    if copy:
        worker = make_worker(context, folder, 1, shards, lr, kind=SamplingWorker)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict = {"rounds": [], "shared_memory": shared_memory()}
    for step in range(2):
        if step:
            trained.update([UpdateItem(rows(), [6], grpo_loss, GRPOConfig())], 1, step)
        take(hf, {name: tensor.clone() for name, tensor in trained.train.export(torch.float32)})
        if copy:
            train = trained.train
            sent = pack_weights(
                list(train.shapes), train.export(torch.float32), train.shapes, torch.float32, train.version
            )
            worker.take_weights(sent)
        found["rounds"].append(answers(worker, hf))
        found["rounds"][-1]["differ"] = differences(
            worker.rollout.fingerprint(), trained.train.fingerprint(torch.float32)
        )
    if not copy:
        meter, cuts = worker.route.meter, worker.train.shard_specs.values()
        divided = 4 * sum(torch.Size(cut.shape).numel() for cut in cuts if cut.dim is not None)
        found.update(held=meter.held, share=meter.received / 2 / divided, **refusals(worker))
    worker.shutdown()
    found["default_group"] = dist.is_initialized()
    return found


def run_rank(rank: int, world: int, port: int, cases: list[dict], result: Path) -> None:
    """Run all cases on one rank; rank 0 writes what all found."""
    torch.set_num_threads(1)
    context = WorkerContext("actor", rank, world, rank, "here", master=("127.0.0.1", port))
    found = [compare(context, **case) for case in cases]
    everyone: list = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        result.write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world: int, cases: list[dict], result: Path) -> None:
    """Run so many ranks, and end them all when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(rank, world, port, cases, result), daemon=True) for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    left = {rank.sentinel: rank for rank in ranks}
    while left:
        for sentinel in multiprocessing.connection.wait(list(left)):
            done = left.pop(sentinel)
            done.join()
            if done.exitcode:
                sys.exit(f"{done.name} of {world} ended with {done.exitcode}")


def main(folder: str, cases: str) -> None:
    """Run the cases of each number of ranks."""
    for world, each in json.loads(cases).items():
        run_ranks(int(world), each, Path(folder) / f"{world}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
