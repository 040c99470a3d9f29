"""Sampling, log-probs, updates, weights and offload with every tensor on a device of its own, against the CPU.

No GPU is needed (see pretend_gpu.py): a tensor that is left on the wrong device is an error, and numbers are those of
the CPU. Kernels, memory and bf16 under autocast are for tests/engines/test_on_gpu.py.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.rollout import Request, Sampling
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.hf import fused_decode, kept_rows
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.hf.slot_rows import SlotRows
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pretending():
    spec = importlib.util.spec_from_file_location("pretend_gpu", Path(__file__).with_name("pretend_gpu.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(pretending, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    with pretending.pretend_gpu(monkeypatch) as device:
        yield device


def rollout(folder, device, dtype="fp32", shared=None, graphs="off"):
    made = HFRollout(
        ModelConfig(path=str(folder), dtype=dtype), batch_size=8, graphs=graphs, device=device, shared=shared
    )
    made.version = 0
    return made


def sampled(engine, sampling, count=12):
    """Return rows by id; a few of the requests wait for a slot."""
    return answered(engine, [Request(str(i), tuple(range(5, 8 + i % 9)), 7919 * i + 1, sampling) for i in range(count)])


def answered(engine, requests):
    engine.add(requests)
    rows = {}
    while engine.in_flight:
        rows.update((row.id, row) for row in engine.step())
    return rows


def assert_same_rows(got, want):
    assert {name: row.tokens for name, row in got.items()} == {name: row.tokens for name, row in want.items()}
    for name, row in want.items():
        assert got[name].log_probs == pytest.approx(row.log_probs, abs=1e-4)


def trained(folder, device, **options):
    own = {name: options.pop(name) for name in list(options) if name in TorchConfig.__dataclass_fields__}
    model, engine = ModelConfig(path=str(folder)), EngineConfig(lr=1e-3, **options)
    return TorchEngine(TrainSetup(model, engine, TorchConfig(**own), Ranks(device=device), trains=True))


def update(engine, batch):
    return engine.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig(kl_coef=0.1))], epochs=1, step=0)


def weights(engine):
    return {name: tensor.cpu().clone() for name, tensor in engine.export(torch.float32)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen2", {}), ("qwen2", {"temperature": 0.7, "top_k": 5, "min_tokens": 4}), ("gpt2", {"top_p": 0.8})],
)
def test_sampling(model_folder, gpu, kind, options):
    sampling = Sampling(max_tokens=6, **options)
    engine = rollout(model_folder(kind), gpu)
    plain = rollout(model_folder(kind), CPU)
    assert {parameter.device for parameter in engine.hf.parameters()} == {gpu}
    assert engine.description == plain.description
    assert_same_rows(sampled(engine, sampling), sampled(plain, sampling))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5, "min_tokens": 4}])
def test_sampling_in_slots(model_folder, gpu, options, monkeypatch):
    monkeypatch.setattr(SlotRows, "_captured", lambda rows, run: type("Graph", (), {"replay": staticmethod(run)}))
    sampling = Sampling(max_tokens=6, **options)
    engine = rollout(model_folder(), gpu, graphs="auto")
    assert engine.description == "decodes in slots, replaying CUDA graphs"
    assert_same_rows(sampled(engine, sampling), sampled(rollout(model_folder(), CPU), sampling))


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_turns_continue_kept_rows(model_folder, gpu, graphs, monkeypatch):
    """In slots and in the plain form, with a bound that some rows are beyond."""
    monkeypatch.setattr(SlotRows, "_captured", lambda rows, run: type("Graph", (), {"replay": staticmethod(run)}))
    monkeypatch.setattr(kept_rows, "KEPT_SHARE", 3e-5)
    engine, plain = rollout(model_folder(), gpu, graphs=graphs), rollout(model_folder(), CPU)
    first = [Request(str(i), tuple(range(5, 8 + i)), i, Sampling(max_tokens=6), keep=True) for i in range(12)]
    rows, want = answered(engine, first), answered(plain, first)
    assert_same_rows(rows, want)
    assert 0 < len(engine._kept) < len(plain._kept) == 12
    turn = [replace(each, prompt=(*each.prompt, *rows[each.id].tokens, 9), after=each.id) for each in first]
    assert_same_rows(answered(engine, turn), answered(plain, turn))


def test_without_graphs_the_plain_form_decodes(model_folder, gpu):
    engine = rollout(model_folder(), gpu, graphs="auto")
    assert engine.description.startswith("decodes in few kernels, as CUDA graphs failed with ")
    sampled(engine, Sampling(max_tokens=4))


@pytest.mark.parametrize(
    "options", [{}, {"padding_free": False}, {"activation_checkpointing": True, "micro_batch_tokens": 40}]
)
def test_log_probs_and_updates(model_folder, random_batch, gpu, options):
    here, there = trained(model_folder(), gpu, **options), trained(model_folder(), CPU, **options)
    assert here.description == there.description  # the probe of a fast form took no error for a reason to leave it out
    for seed in range(2):
        batch = random_batch(groups=2, seed=seed)
        ours, theirs = (each.compute(batch, ["log_probs", "entropy"]) for each in (here, there))
        for name, values in theirs.items():
            torch.testing.assert_close(ours[name].values, values.values)
        got, want = update(here, batch), update(there, batch)
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-4)
        here.offload()
        assert {parameter.device for parameter in here.held_parameters().values()} == {gpu}  # a sampler shares them
        assert {state["exp_avg"].device for state in here.optimizer.state.values()} == {CPU}
    for name, tensor in weights(there).items():
        torch.testing.assert_close(weights(here)[name], tensor, atol=1e-4, rtol=1e-3)


def test_a_sampler_follows_the_trainer(model_folder, random_batch, gpu):
    engine = trained(model_folder(), gpu)
    shares, copies = rollout(model_folder(), gpu, shared=engine.shared_module), rollout(model_folder(), gpu)
    for seed in range(2):
        update(engine, random_batch(groups=2, seed=seed))
        for each in (shares, copies):
            each.sync(engine.export(torch.float32), engine.version, engine.shapes)
        assert_same_rows(sampled(copies, Sampling(max_tokens=4), 6), sampled(shares, Sampling(max_tokens=4), 6))


def test_a_fingerprint_on_a_gpu_is_that_on_the_cpu(model_folder, gpu):
    here, there = trained(model_folder(), gpu), trained(model_folder(), CPU)
    for dtype in (torch.float32, torch.bfloat16):
        assert here.fingerprint(dtype) == there.fingerprint(dtype)
    assert rollout(model_folder(), gpu).fingerprint() == there.fingerprint(torch.float32)


def test_training_goes_on_after_a_save(model_folder, random_batch, gpu, tmp_path):
    straight, resumed = trained(model_folder(), gpu), trained(model_folder(), gpu)
    update(straight, random_batch())
    straight.save(tmp_path)
    resumed.restore(tmp_path)
    update(straight, random_batch(seed=1))
    update(resumed, random_batch(seed=1))
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(resumed)[name], tensor)


def test_a_tensor_on_the_wrong_device_is_found(model_folder, random_batch, gpu, monkeypatch):
    tables = fused_decode.rotary_tables
    monkeypatch.setattr(fused_decode, "rotary_tables", lambda *args: [each.cpu() for each in tables(*args)])
    with pytest.raises(RuntimeError, match=r"expected all tensors on cuda:0, but one of shape .* is on cpu"):
        rollout(model_folder(), gpu)
