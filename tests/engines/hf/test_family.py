"""Families with layers that keep a state sample as their own forward does, or are refused at the start. About 15 s."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    Olmo2Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Request, Sampling
from rlcore.engines.hf.cache import BufferedLayer
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import ConfigError

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "head_dim": 12,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HYBRID = {
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "qwen3_next": (Qwen3NextConfig, {**LINEAR, **EXPERTS}),
    "qwen3_5": (Qwen3_5TextConfig, LINEAR),
    "falcon_h1": (FalconH1Config, {}),
}


def open_rollout(folder, slots=4):
    rollout = HFRollout(ModelConfig(path=str(folder)), batch_size=slots, device=torch.device("cpu"), shared=None)
    rollout.version = 0
    return rollout


@pytest.mark.parametrize("family", HYBRID)
def test_rows_that_join_and_leave_sample_as_the_models_own_forward(engine_models, tmp_path, family):
    """Seven rows of different lengths in three slots; each log-prob is that of the plain model on the row alone."""
    folder = engine_models.write_random(*HYBRID[family], tmp_path)
    rollout = open_rollout(folder, slots=3)
    prompts = [tuple(range(5, 7 + index % 4)) for index in range(6)] + [(9,)]
    rollout.add(
        [
            Request(str(index), prompt, index, Sampling(max_tokens=2 + 3 * index % 7), keep=index == 0)
            for index, prompt in enumerate(prompts)
        ]
    )
    done = []
    while rollout.in_flight:
        done += rollout.step()
    # One more turn of a row that was to be kept.
    first = next(row for row in done if row.id == "0")
    longer = (*prompts[0], *first.tokens, 8)
    rollout.add([Request("more", longer, 99, Sampling(max_tokens=3), after="0")])
    while rollout.in_flight:
        done += rollout.step()
    assert len(done) == 8
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in done:
        prompt = longer if row.id == "more" else prompts[int(row.id)]
        with torch.no_grad():
            log_probs = hf(input_ids=torch.tensor([[*prompt, *row.tokens]]), use_cache=False).logits[0].log_softmax(-1)
        wanted = [log_probs[len(prompt) - 1 + at, token].item() for at, token in enumerate(row.tokens)]
        assert row.log_probs == pytest.approx(wanted, abs=2e-4)


def test_layers_that_padding_changes_are_refused_with_their_kinds(engine_models, tmp_path):
    folder = engine_models.write_random(MambaConfig, {}, tmp_path)
    with pytest.raises(ConfigError, match=r"cannot sample Mamba\w+, whose layers are linear_attention.*rollout=vllm"):
        open_rollout(folder)


@pytest.mark.parametrize("kind", [GPT2Config, Olmo2Config])
def test_a_family_whose_numbers_the_cache_changes_is_refused(engine_models, tmp_path, monkeypatch, kind):
    folder = engine_models.write_random(kind, {}, tmp_path)
    assert open_rollout(folder)._fused is None
    update = BufferedLayer.update

    def forgetting(layer, keys, values, *arguments, **named):
        keys, values = update(layer, keys, values, *arguments, **named)
        return keys, values if keys.shape[2] == 5 else values.roll(1, -1)

    monkeypatch.setattr(BufferedLayer, "update", forgetting)
    with pytest.raises(ConfigError, match=r"With the cache of rollout=hf its log-probs are off by \d"):
        open_rollout(folder)
