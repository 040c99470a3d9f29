"""Families that the cache of rollout=hf does not fit are refused at the start. About 4 s."""

import pytest
import torch
from transformers import GPT2Config, Lfm2Config, MambaConfig, Olmo2Config

from rlcore.config import ModelConfig
from rlcore.engines.hf.cache import BufferedLayer
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import ConfigError


def open_rollout(folder):
    return HFRollout(ModelConfig(path=str(folder)), batch_size=4, device=torch.device("cpu"), shared=None)


@pytest.mark.parametrize(
    ("kind", "options", "layers"),
    [
        (Lfm2Config, {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "conv, full_att"),
        (MambaConfig, {}, "linear_attention"),
    ],
)
def test_layers_that_keep_a_state_are_refused_with_their_kinds(engine_models, tmp_path, kind, options, layers):
    folder = engine_models.write_random(kind, options, tmp_path)
    with pytest.raises(ConfigError, match=rf"cannot sample \w+, whose layers are {layers}.*rollout=vllm"):
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
    with pytest.raises(ConfigError, match=r"with it the log-probs are off by \d"):
        open_rollout(folder)
