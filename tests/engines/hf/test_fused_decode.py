"""The fused decode step: the module's own numbers, and when it is not used."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.engine.rollout import Sampling
from rlcore.engines.hf.fused_decode import FusedDecodeStep


def test_a_model_without_a_fused_step_says_so_once_and_one_that_is_off_is_found(caplog, monkeypatch, make_rollout):
    with caplog.at_level("INFO", "rlcore.engines.hf.fused_decode"):
        make_rollout("qwen2")
        assert not caplog.records
        make_rollout("mistral-window")
        assert "no fast form of sliding_attention is known" in caplog.text
        monkeypatch.setattr(torch.Tensor, "roll", lambda values, *_: -values)
        assert make_rollout("qwen2")._fused is None
        assert "its log-probs would be off by" in caplog.text


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_step_is_the_modules_own(model_folder, kind, dtype):
    """In bf16 it rounds where autocast does."""
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32).eval()
    before = {name: parameter.clone() for name, parameter in hf.named_parameters()}
    fused, _ = FusedDecodeStep.of(hf, dtype)
    assert fused is not None
    assert all(torch.equal(before[name], parameter) for name, parameter in hf.named_parameters())
    assert fused.probe() < (1e-5 if dtype is torch.float32 else 1e-2)


def test_the_fused_step_follows_the_weights(model_folder, make_rollout, prompts):
    """An update in place, as of an optimizer, is seen without a word: there is no copy to be stale."""
    hf = AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), dtype=torch.float32).eval()
    rollout = make_rollout("qwen2", shared=hf)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    assert rollout._fused.probe() < 1e-5
    batch = prompts(3, 1)
    out = rollout.generate(batch, Sampling(max_tokens=9, temperature=0.0))
    assert (rollout._fused._products, rollout._fused._head) == ([], None), "nothing is held while the module trains"
    for prompt, response in zip(batch["prompts"].to_list(), out["responses"].to_list(), strict=True):
        ids = torch.cat([prompt, response])[None]
        with torch.no_grad():
            assert hf(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == response.tolist()
