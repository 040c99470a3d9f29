"""The packed forward and the chunked head against the model's own forward, for several architectures."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTJConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen2ForCausalLM,
)

from rlcore.config import ModelConfig
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.torch.model import load_causal_lm
from rlcore.engines.torch.packing import Packing
from rlcore.errors import ConfigError

CPU = torch.device("cpu")
PROMPT = [50, 51, 52, 53, 54]
ROWS = [[5, 9, 11, 40, 41, 42, 7], [*PROMPT, 8], [8], [30, 31, 32], [*PROMPT, *range(55, 95)], PROMPT, [*PROMPT, 8, 9]]
PROMPTS = [3, 5, 1, 3, 5, 5, 5]


def load(folder, **options):
    return load_causal_lm(ModelConfig(path=str(folder)), **{"padding_free": True, "chunk": 4, "device": CPU, **options})


def everything(model, temperature=1.0):
    packing = model.pack([torch.tensor(row) for row in ROWS], PROMPTS)
    rows = [(torch.tensor(number), torch.arange(len(row) - 1)) for number, row in enumerate(ROWS)]
    select = torch.cat([packing.token(*row) for row in rows])
    labels = torch.tensor([token for row in ROWS for token in row[1:]])
    return model(packing, select, labels, ("log_probs", "entropy"), temperature)


def reference(folder, temperature=1.0, **options):
    """One row at a time through the plain Hugging Face model: no packing, no padding, no chunks."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    log_probs, entropy = [], []
    for row in ROWS:
        if len(row) < 2:
            continue
        log_p = (hf(input_ids=torch.tensor([row])).logits[0, :-1] / temperature).log_softmax(-1)
        log_probs.append(log_p[range(len(row) - 1), row[1:]])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    loss = (torch.cat(log_probs) + 0.3 * torch.cat(entropy)).sum()
    loss.backward()
    return torch.cat(log_probs), torch.cat(entropy), {name: p.grad for name, p in hf.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("kind", "packed", "fused"),
    [
        ("qwen2", True, True),
        ("llama", True, True),
        ("qwen3", True, True),
        ("mistral-window", False, True),
        ("gemma2", False, False),
    ],
)
def test_log_probs_entropy_and_gradient_equal_the_plain_model(
    model_folder, assert_close, kind, packed, fused, temperature
):
    model = load(model_folder(kind))
    assert (model.packed, model.fused_head) == (packed, fused)
    attention = "eager" if kind == "gemma2" else "sdpa"  # sdpa leaves its soft cap out
    want_log_probs, want_entropy, want_grads = reference(model_folder(kind), temperature, attn_implementation=attention)
    got = everything(model, temperature)
    torch.testing.assert_close(got["log_probs"], want_log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got["entropy"], want_entropy, rtol=1e-4, atol=1e-5)
    (got["log_probs"] + 0.3 * got["entropy"]).sum().backward()
    assert_close({name: p.grad for name, p in model.hf.named_parameters()}, want_grads, 1e-4)


def test_prompts_that_rows_share_stand_once_and_rows_of_like_length_attend_together():
    rows = [torch.tensor(row) for row in ROWS]
    packing = Packing.of(rows, prompts=PROMPTS)
    assert packing.input_ids.tolist() == [*ROWS[0], *PROMPT, 8, 8, *ROWS[3], *range(55, 95), 8, 9]
    assert packing.positions.tolist() == [*range(7), *range(6), 0, *range(3), *range(5, 45), 5, 6]
    assert sorted((part.rows, part.longest) for part in packing.parts) == [(1, 45), (6, 7)]
    for number, row in enumerate(ROWS):
        tokens = packing.token(torch.tensor(number), torch.arange(len(row)))
        assert packing.input_ids[tokens].tolist() == row
        assert packing.positions[tokens].tolist() == list(range(len(row)))
    assert torch.equal(packing.unpad(*(part.to_padded(packing.input_ids) for part in packing.parts)), packing.input_ids)
    assert sum(map(len, ROWS)) == len(Packing.of(rows).input_ids) > len(packing.input_ids)


def test_padding_can_be_asked_for(model_folder):
    padded, packed = load(model_folder(), padding_free=False), load(model_folder())
    assert not padded.packed
    torch.testing.assert_close(everything(padded)["log_probs"], everything(packed)["log_probs"], rtol=1e-4, atol=1e-5)


def test_a_model_whose_head_is_not_linear_falls_back_with_a_line_in_the_log(model_folder, caplog, monkeypatch):
    forward = Qwen2ForCausalLM.forward

    def squashing(model, *args, **arguments):
        out = forward(model, *args, **arguments)
        out.logits = out.logits.tanh()
        return out

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", squashing)
    with caplog.at_level("INFO", logger="rlcore"):
        model = load(model_folder())
    assert not model.fused_head
    assert "computing logits in chunks is off by" in caplog.text


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Gemma2Config, {"head_dim": 12, "final_logit_softcapping": 3.0}, "final_logit_softcapping=3.0"),
        (GraniteConfig, {"logits_scaling": 1.00001}, "logits_scaling=1.00001"),
        (CohereConfig, {"logit_scale": 0.99999}, "logit_scale=0.99999"),
        (LlamaConfig, {}, None),
    ],
)
def test_logits_that_a_config_changes_are_the_models_own(engine_models, tmp_path, caplog, kind, options, said):
    """A probe of a fresh model, whose logits are small, would not see it."""
    folder = engine_models.write_random(kind, {**options, "initializer_range": 1e-4}, tmp_path)
    with caplog.at_level("INFO", logger="rlcore"):
        model = load(folder)
    assert model.fused_head == (said is None)
    assert said is None or f"{said} is set: the model computes its own logits" in caplog.text


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GptOssConfig, {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
        (GPTJConfig, {"n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256}),
    ],
)
def test_a_family_without_sdpa_is_eager(engine_models, tmp_path, kind, options):
    folder = engine_models.write_random(kind, options, tmp_path)
    model = load(folder)
    assert model.attention == "eager"
    want, _, _ = reference(folder, 1.0, attn_implementation="eager")
    torch.testing.assert_close(everything(model)["log_probs"], want, rtol=1e-4, atol=1e-5)


def test_attention_with_a_soft_cap_is_the_models_own(engine_models, tmp_path):
    """sdpa leaves the cap out."""
    options = {"head_dim": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}
    folder = engine_models.write_random(Gemma2Config, options, tmp_path)
    want, _, _ = reference(folder, 1.0, attn_implementation="eager")
    model = load(folder)
    assert model.attention == "eager"
    torch.testing.assert_close(everything(model)["log_probs"], want, rtol=1e-4, atol=1e-5)
    rollout = HFRollout(ModelConfig(path=str(folder)), batch_size=4, device=torch.device("cpu"), shared=None)
    assert rollout.attention == "eager"
    with pytest.raises(ConfigError, match=r"model\.attention=sdpa leaves out .*attn_logit_softcapping=2\.0"):
        load_causal_lm(
            ModelConfig(path=str(folder), attention="sdpa"), padding_free=True, chunk=8, device=torch.device("cpu")
        )


def test_logits_come_divided_by_the_temperature(model_folder):
    model = load(model_folder())
    packing = Packing.of([torch.tensor(ROWS[0])])
    select, labels = torch.arange(6), torch.tensor(ROWS[0][1:])
    one, half = (model(packing, select, labels, ("logits",), t)["logits"] for t in (1.0, 0.5))
    assert one.shape == (6, 97)
    torch.testing.assert_close(half, 2 * one)


def test_a_folder_that_does_not_load_is_a_config_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    with pytest.raises(ConfigError, match="does not load as a causal language model"):
        load(tmp_path)
