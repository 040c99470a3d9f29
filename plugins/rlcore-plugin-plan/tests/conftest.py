"""Models of the paper's sizes, its PPO, and problems on clusters of any size; nothing here runs a model."""

from dataclasses import replace

import pytest
from rlcore_plugin_plan.dataflow import Call, Dataflow
from rlcore_plugin_plan.model_size import ModelSize
from rlcore_plugin_plan.problem import Devices, Problem
from rlcore_plugin_plan.profile import load
from rlcore_plugin_plan.workload import Lengths, Workload

from rlcore.engine import ModelShape

# layers, hidden, feed-forward, heads, key-value heads of Llama's sizes.
LLAMA = {"7b": (32, 4096, 11008, 32, 32), "13b": (40, 5120, 13824, 40, 40), "70b": (80, 8192, 28672, 64, 8)}


def llama(name: str, head: str = "vocabulary") -> ModelSize:
    layers, hidden, ffn, heads, kv = LLAMA[name]
    layer = 2 * hidden * hidden + 2 * hidden * hidden * kv // heads + 3 * hidden * ffn
    shape = ModelShape(layers, {"num_attention_heads": heads, "num_key_value_heads": kv})
    return ModelSize(layers, hidden, layer, heads, kv, hidden // heads, 32000, False, head, shape)


PPO = Dataflow(
    (
        Call("actor", "generate", 1, prompts=1),
        Call("critic", "values", 1, needs=(0,)),
        Call("ref", "log_probs", 1, needs=(0,)),
        Call("reward_model", "score", 1, needs=(0,)),
        Call("critic", "update", 1, mini_batches=8, needs=(1, 2, 3)),
        Call("actor", "update", 1, mini_batches=8, needs=(1, 2, 3)),
    )
)
"""The paper's (arXiv 2409.19256, Fig. 6): 8 updates, log-probs of the rollout taken as they are."""


@pytest.fixture(scope="session")
def paper():
    """Return the paper's PPO on machines of 8 A100-80G: 1024 prompts of 1024 tokens, responses of 1024, bf16."""

    def make(actor: str, critic: str, gpus: int, **work) -> Problem:
        sizes = {
            "actor": llama(actor),
            "critic": llama(critic, "number"),
            "ref": llama(actor),
            "reward_model": llama(critic, "number"),
        }
        engine = {"continuous": True, "shares_module": False, "pooled_cache": True}  # as vLLM
        settings = {"recompute": True, "micro_batch_tokens": 8192, **engine, **work}
        workload = Workload(1024, Lengths(1024, (1024,)), **settings)
        devices = (Devices(load("a100-80g"), gpus),)
        return Problem(PPO, sizes, frozenset({"actor", "critic"}), workload, devices, {})

    return make


@pytest.fixture(scope="session")
def model():
    """Return the sizes of a Llama."""
    return llama


@pytest.fixture
def small(paper):
    """Return PPO of models of 8 layers on a small cluster, whose memory decides what fits."""

    def make(gpus: int, memory: float = 4e9, per_machine: int = 2, roles: int = 4, **work) -> Problem:
        problem = paper("7b", "7b", gpus, **work)
        size = ModelSize(8, 1024, 12 * 1024**2, 8, 8, 128, 1000, True, shape=ModelShape(8, {"heads": 8}))
        profile = replace(problem.devices[0].profile, memory=memory, per_machine=per_machine)
        names = list(problem.sizes)[:roles]
        calls = tuple(call for call in PPO.calls if call.role in names)
        needs = {call: tuple(calls.index(PPO.calls[n]) for n in call.needs if PPO.calls[n] in calls) for call in calls}
        flow = Dataflow(tuple(replace(call, needs=needs[call]) for call in calls))
        sizes = {name: size if name in ("actor", "ref") else replace(size, head="number") for name in names}
        return replace(problem, dataflow=flow, sizes=sizes, devices=(Devices(profile, gpus),))

    return make
