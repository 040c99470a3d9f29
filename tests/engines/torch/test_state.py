"""Weights and training state to disk and back, bit for bit."""

import json

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.errors import CheckpointError


def step(engine, batch, number=0):
    return engine.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig())], epochs=1, step=number)


def test_training_goes_on_bit_for_bit_after_a_save(make_engine, random_batch, tmp_path):
    straight, saved, resumed = (make_engine(lr=1e-2) for _ in range(3))
    for engine in (straight, saved):
        for seed in range(2):
            step(engine, random_batch(seed=seed))
    saved.save(tmp_path)
    random_before = torch.rand(3)
    resumed.restore(tmp_path)
    assert torch.equal(torch.rand(3), random_before)
    assert resumed.version == 2
    assert step(resumed, random_batch(seed=5)) == step(straight, random_batch(seed=5))
    want = dict(straight.export(torch.float32))
    assert all(torch.equal(want[name], tensor) for name, tensor in resumed.export(torch.float32))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_exported_folder_opens_with_transformers(make_engine, random_batch, tmp_path, kind):
    engine = make_engine(kind, lr=1e-2)
    step(engine, random_batch())
    engine.save_pretrained(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    mine = dict(engine.export(torch.float32))
    assert {name for name, _ in hf.named_parameters()} == set(mine)
    assert all(torch.equal(mine[name], tensor) for name, tensor in hf.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path)("1+1=")["input_ids"]


def test_a_state_that_does_not_fit_is_refused(make_engine, tmp_path):
    make_engine("llama").save(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the model: missing .*q_proj.bias.* unknown .*lm_head"):
        make_engine("qwen2").restore(tmp_path)


def test_a_damaged_state_is_refused(make_engine, tmp_path):
    engine = make_engine()
    engine.save(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({})[:1])
    with pytest.raises(CheckpointError, match=r"engine.json cannot be read"):
        engine.restore(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({"version": 1, "random": []}))
    with pytest.raises(CheckpointError, match=r"engine.json cannot be read: KeyError: 'steps'"):
        engine.restore(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x00\x01")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        engine.restore(tmp_path)


def test_parking_changes_no_bit(make_engine, random_batch):
    plain, parked = make_engine(lr=1e-2), make_engine(lr=1e-2)
    for seed in range(3):
        parked.offload()
        metrics = step(parked, random_batch(seed=seed))
        assert {name: metrics.pop(f"memory/{name}") for name in ("before_offload_gb", "offloaded_gb")} == {
            "before_offload_gb": 0.0,  # there is no device to count on
            "offloaded_gb": 0.0,
        }
        assert metrics == step(plain, random_batch(seed=seed))
    want = dict(plain.export(torch.float32))
    assert all(torch.equal(want[name], tensor) for name, tensor in parked.export(torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parking_frees_the_device(model_folder, random_batch):
    """Weights stay, as the rollout engine of a single rank shares them; moments, twice as large, and gradients go."""
    device = torch.device("cuda", 0)
    engine = TorchEngine(
        TrainSetup(
            ModelConfig(path=str(model_folder())),
            EngineConfig(),
            TorchConfig(),
            ranks=Ranks(device=device),
            trains=True,
        )
    )
    step(engine, random_batch())
    engine.offload()
    metrics = step(engine, random_batch())
    gone = 3 * 4 * sum(tensor.numel() for _, tensor in engine.export(torch.float32)) / 1e9
    assert metrics["memory/before_offload_gb"] - metrics["memory/offloaded_gb"] == pytest.approx(gone, rel=0.1)
