"""LoRA adapters in the torch engine, against the package peft."""

import gc
import json
import shutil

import peft
import pytest
import torch
from peft import LoraConfig as PeftConfig
from rlcore_grpo import GRPOConfig, grpo_loss
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlcore.adapter_folder import SETTINGS, WEIGHTS, AdapterFolder
from rlcore.config import EngineConfig, LoraConfig, ModelConfig
from rlcore.engine.adapter import PARTS, adapted
from rlcore.engine.collectives import Ranks
from rlcore.engine.rollout import Sampling
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.errors import CheckpointError, ConfigError, DataError, WeightsError
from rlcore.plugins import CRITIC, POLICY

SOME = ["q_proj", "down_proj"]


def make(folder, *, rank=4, trains=True, kind=POLICY, dtype="fp32", lr=1e-2, own=None, frozen=False, **lora):
    model = ModelConfig(path=str(folder), dtype=dtype, lora=LoraConfig(rank=rank, **lora))
    engine = EngineConfig(lr=lr, clip_grad=0.0, micro_batch_rows=5)
    config = TorchConfig(**(own or {}))
    return TorchEngine(TrainSetup(model, engine, config, Ranks(), trains, kind, frozen=frozen, total_steps=10))


def randomise(engine):
    """Give the adapters' B numbers, without which the gradients of A are 0."""
    torch.manual_seed(3)
    for layer in engine.adapted.values():
        layer.lora_b.data = 0.1 * torch.randn_like(layer.lora_b)
    return engine


def learn(engine, batch, steps=2):
    item = UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig(kl_coef=0.1), keep_together="uid")
    return [engine.update([item], epochs=1, step=step) for step in range(steps)]


def log_probs(engine, batch):
    return engine.compute(batch, ["log_probs"])["log_probs"].values


def plain_log_probs(model, batch):
    """The log-probs of all response tokens by a transformers module, row after row."""
    found = []
    for prompt, response in zip(batch.view("prompts").to_list(), batch.view("responses").to_list(), strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return torch.cat(found)


def peft_model(folder, engine):
    """A peft model on the same base, with the engine's adapters."""
    names = [name for name, _ in engine.adapted.items()]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, PeftConfig(r=4, lora_alpha=8, target_modules=names)).eval()
    with torch.no_grad():
        for name, layer in engine.adapted.items():
            theirs = model.base_model.model.get_submodule(name)
            theirs.lora_A["default"].weight.copy_(layer.lora_a)
            theirs.lora_B["default"].weight.copy_(layer.lora_b)
    return model


@pytest.mark.parametrize("targets", ["all-linear", SOME])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # with tied embeddings and without
def test_values_and_gradients_are_those_of_peft(model_folder, random_batch, kind, targets):
    engine = randomise(make(model_folder(kind), targets=targets))
    theirs, batch = peft_model(model_folder(kind), engine), random_batch()
    expected = plain_log_probs(theirs, batch)
    assert torch.allclose(log_probs(engine, batch), expected, atol=2e-6)
    expected.sum().backward()
    engine.forward_backward([batch], ["log_probs"], lambda _, out: out["log_probs"].sum(), last=True)
    for name, layer in engine.adapted.items():
        other = theirs.base_model.model.get_submodule(name)
        for own, grad in ((layer.lora_a, other.lora_A), (layer.lora_b, other.lora_B)):
            want = grad["default"].weight.grad
            assert (own.grad - want).norm() / want.norm() < 5e-6, name
    trained = {name for name, each in engine.model.hf.named_parameters() if each.requires_grad}
    assert trained == {f"{name}.{part}" for name in engine.adapted for part in PARTS}
    layers = 2 * (7 if targets == "all-linear" else 2)
    assert len(engine.adapted) == layers


def test_a_new_adapter_changes_nothing_and_the_base_stays(model_folder, random_batch):
    plain, engine = make(model_folder(), rank=0), make(model_folder())
    batch = random_batch()
    assert log_probs(engine, batch).equal(log_probs(plain, batch))
    before = {name: each.clone() for name, each in engine.model.hf.named_parameters() if not each.requires_grad}
    learn(engine, batch)
    assert not log_probs(engine, batch).equal(log_probs(plain, batch))
    for name, each in before.items():
        assert engine.model.hf.get_parameter(name).equal(each), name


def test_peft_opens_the_folder_and_computes_the_same(model_folder, random_batch, tmp_path):
    engine, batch = make(model_folder()), random_batch()
    learn(engine, batch)
    engine.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.allclose(plain_log_probs(theirs, batch), log_probs(engine, batch), atol=2e-6)
    assert theirs.peft_config["default"].base_model_name_or_path == str(model_folder())
    merged = dict(theirs.merge_and_unload().named_parameters())
    exported = dict(engine.export(torch.float32))
    assert exported.keys() == engine.shapes.keys() == merged.keys()
    for name, weight in exported.items():
        assert torch.allclose(weight, merged[name], atol=1e-6), name


def test_an_adapter_of_peft_is_trained_on_and_merged_into_what_does_not_train(model_folder, random_batch, tmp_path):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    config = PeftConfig(r=3, lora_alpha=12, target_modules=SOME, init_lora_weights=False, use_rslora=True)
    theirs, batch = peft.get_peft_model(base, config).eval(), random_batch()
    theirs.save_pretrained(tmp_path)
    expected = plain_log_probs(theirs, batch).detach()
    start = {"rank": 0, "path": str(tmp_path)}
    for trains in (True, False):
        engine = make(model_folder("llama"), trains=trains, **start)
        assert torch.allclose(log_probs(engine, batch), expected, atol=3e-6), trains
        assert len(adapted(engine.model.hf)) == (4 if trains else 0)
    assert not [name for name in engine.shapes if "lora" in name]


@pytest.mark.parametrize("from_folder", [False, True])
def test_the_reference_is_the_start_without_memory_of_its_own(model_folder, random_batch, tmp_path, from_folder):
    lora = {}
    if from_folder:
        randomise(make(model_folder())).save_pretrained(tmp_path)
        lora = {"rank": 0, "path": str(tmp_path)}
    engine, batch = make(model_folder(), **lora), random_batch()
    apart = make(model_folder(), trains=False, frozen=True, rank=0, path=lora.get("path"))
    learn(engine, batch)

    def held():
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    before = held()
    reference = engine.without_adapter()
    assert held() == before
    own, theirs = log_probs(reference, batch), log_probs(apart, batch)
    assert own.equal(theirs) if not from_folder else torch.allclose(own, theirs, atol=2e-6)
    assert not own.equal(log_probs(engine, batch))
    assert reference.fingerprint(torch.float32) == apart.fingerprint(torch.float32)
    with pytest.raises(DataError, match="without its adapter"):
        reference.step(1.0, lambda squares: 1.0)


def test_a_restored_engine_goes_on_bit_for_bit(model_folder, random_batch, tmp_path):
    engine, batch = make(model_folder(), dropout=0.3), random_batch()
    learn(engine, batch)
    engine.save(tmp_path)
    assert {path.name for path in (tmp_path / "model").glob("*.safetensors")} == {WEIGHTS}
    learn(engine, batch)
    torch.manual_seed(99)
    again = make(model_folder(), dropout=0.3)
    again.restore(tmp_path)
    assert again.version == 2
    learn(again, batch)
    for (name, one), (_, other) in zip(engine.export(torch.float32), again.export(torch.float32), strict=True):
        assert one.equal(other), name


def test_dropout_is_on_in_training_only(model_folder, random_batch):
    plain, dropping = (randomise(make(model_folder(), dropout=dropout)) for dropout in (0.0, 0.5))
    batch = random_batch()
    assert log_probs(plain, batch).equal(log_probs(dropping, batch))
    seen = []
    for _ in range(2):
        dropping.forward_backward(
            [batch], ["log_probs"], lambda _, out: seen.append(out) or out["log_probs"].sum(), last=True
        )
    assert not seen[0]["log_probs"].equal(seen[1]["log_probs"])


def test_a_state_of_another_base_is_refused(model_folder, random_batch, tmp_path):
    engine = make(model_folder())
    learn(engine, random_batch())
    engine.save(tmp_path / "state")
    other = shutil.copytree(model_folder(), tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
    model.save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"trained on other weights than those of model.path="):
        make(other).restore(tmp_path / "state")
    with pytest.raises(CheckpointError, match="saved with an adapter, and the run is without one"):
        make(model_folder(), rank=0).restore(tmp_path / "state")


def test_a_base_in_bf16_is_kept_in_bf16(model_folder, random_batch):
    engine, batch = make(model_folder("llama"), dtype="bf16"), random_batch()
    assert {layer.weight.dtype for layer in engine.adapted.values()} == {torch.bfloat16}
    assert {layer.lora_a.dtype for layer in engine.adapted.values()} == {torch.float32}
    plain = make(model_folder("llama"), dtype="bf16", rank=0)
    assert log_probs(engine, batch).equal(log_probs(plain, batch))
    learn(engine, batch)
    assert not log_probs(engine, batch).equal(log_probs(plain, batch))


def test_a_critic_trains_its_adapter_and_its_head(model_folder, random_batch, tmp_path):
    engine, batch = make(model_folder(), kind=CRITIC), random_batch()

    def loss(_, out):
        return (out["values"] - 1).square().sum()

    for _ in range(2):
        engine.zero_grad()
        engine.forward_backward([batch], ["values"], loss, last=True)
        engine.step(1e-2, lambda squares: 1.0)
    values = engine.compute(batch, ["values"])["values"].values
    assert values.abs().min() > 0
    randomise(make(model_folder())).save_pretrained(tmp_path / "policy")
    from_policy = make(model_folder(), kind=CRITIC, rank=0, path=str(tmp_path / "policy"))
    assert from_policy.compute(batch, ["values"])["values"].values.eq(0).all()  # its head is new
    engine.save(tmp_path)
    again = make(model_folder(), kind=CRITIC)
    again.restore(tmp_path)
    assert again.compute(batch, ["values"])["values"].values.equal(values)
    base = AutoModelForSequenceClassification.from_pretrained(model_folder(), num_labels=1, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "model")
    assert theirs.base_model.model.score.weight.equal(engine.model.hf.score.weight)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])  # the fused step, and the module's own forward
def test_samples_come_from_the_trained_adapter(model_folder, random_batch, kind):
    engine = randomise(make(model_folder(kind)))
    rollout = HFRollout(engine.model_config, batch_size=4, device=torch.device("cpu"), shared=engine.shared_module)
    assert ("few kernels" in rollout.description) == (kind == "qwen2")
    rollout.version = engine.version
    prompts = random_batch().select(batch_keys=["prompts", "sample_index"], non_tensor_batch_keys=["uid"])
    sampled = prompts.union(rollout.generate(prompts, Sampling(max_tokens=8)))
    sampled = sampled.select(batch_keys=["prompts", "responses", "rollout_log_probs"])
    found = sampled.view("rollout_log_probs").values
    assert torch.allclose(found, log_probs(engine, sampled), atol=2e-5)
    assert not torch.allclose(found, log_probs(engine.without_adapter(), sampled), atol=1e-2)
    assert rollout.fingerprint() == engine.fingerprint(torch.float32)


def test_another_engine_gets_the_merged_weights(model_folder, random_batch):
    engine, batch = make(model_folder()), random_batch()
    learn(engine, batch)
    follower = make(model_folder(), rank=0, trains=False)
    follower.follow(engine, 1.0)
    assert torch.allclose(log_probs(follower, batch), log_probs(engine, batch), atol=2e-6)
    with pytest.raises(DataError, match="trains an adapter"):
        engine.follow(follower, 1.0)


def test_an_optimizer_that_steps_no_adapter_is_found(model_folder, random_batch):
    engine = make(model_folder())
    for layer in engine.adapted.values():
        for part in PARTS:
            setattr(layer, part, nn.Parameter(layer.get_parameter(part).detach().clone()))
    with pytest.raises(WeightsError, match="changed no weight"):
        learn(engine, random_batch(), steps=1)


def test_layers_that_do_not_exist_are_named(model_folder):
    with pytest.raises(
        ConfigError, match=r"model.lora.targets names 'query', which no linear layer of Qwen2.* has; it has"
    ):
        make(model_folder(), targets=["q_proj", "query"])
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no torch.nn.Linear but its head"):
        make(model_folder("gpt2"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is true; rlcore computes false"),
        ({"bias": "all"}, 'bias is "all"; rlcore computes "none"'),
        ({"peft_type": "IA3"}, 'peft_type is "IA3"; rlcore computes "LORA"'),
        ({"r": 0}, "r is 0, and must be a whole number from 1"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
        ({"target_modules": ".*q_proj"}, "reads a list of names, or all-linear"),
    ],
)
def test_an_adapter_that_rlcore_does_not_compute_is_refused(model_folder, tmp_path, settings, message):
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": SOME, **settings}
    (tmp_path / SETTINGS).write_text(json.dumps(given))
    (tmp_path / WEIGHTS).touch()
    with pytest.raises(ConfigError, match=message):
        AdapterFolder.of(str(tmp_path))


def test_an_adapter_of_another_model_is_refused(model_folder, tmp_path):
    make(model_folder("qwen3")).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"does not fit the model: base_model.model.model.layers.0.self_attn.\w+.lora_"
    ):
        make(model_folder("qwen2"), rank=0, path=str(tmp_path))
