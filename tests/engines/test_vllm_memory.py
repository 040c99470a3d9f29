"""vLLM's share of a GPU's memory, its versions, and its place in a run; these need neither vLLM nor a GPU."""

import importlib.metadata

import pytest
import torch

from rlcore.config import compose
from rlcore.engines.vllm import internals
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.engines.vllm.memory import AWAKE_SHARE, MemoryPlan, Needs, plan
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager

MB = 1 << 20
ROOMY = Needs(row=4 * MB, rows=64, weights=1000 * MB, training=6000 * MB, beside_training=True)


def test_room_for_all_rows_is_taken_where_it_fits_beside_training():
    free = 9000 * MB  # 2000 MB are left, 30 % of them hold 150 rows
    assert plan(VLLMConfig(), ROOMY, free) == MemoryPlan(64 * 4 * MB, sleeps=False)


def test_where_it_does_not_fit_beside_training_vllm_sleeps():
    free = 7400 * MB
    assert plan(VLLMConfig(), ROOMY, free) == MemoryPlan(64 * 4 * MB, sleeps=True)
    awake = plan(VLLMConfig(sleep="off"), ROOMY, free)
    assert awake == MemoryPlan(int(AWAKE_SHARE * 400 * MB), sleeps=False)


def test_a_given_size_is_taken_and_decides_whether_vllm_sleeps():
    assert plan(VLLMConfig(memory=100), ROOMY, 7400 * MB) == MemoryPlan(100 * MB, sleeps=False)
    assert plan(VLLMConfig(memory=200), ROOMY, 7400 * MB) == MemoryPlan(200 * MB, sleeps=True)
    assert plan(VLLMConfig(memory=200, sleep="off"), ROOMY, 7400 * MB) == MemoryPlan(200 * MB, sleeps=False)


def test_a_pool_of_its_own_takes_more_and_never_sleeps():
    alone = Needs(row=4 * MB, rows=64, weights=1000 * MB, training=0, beside_training=False)
    assert plan(VLLMConfig(), alone, 1200 * MB) == MemoryPlan(170 * MB, sleeps=False)


def test_one_row_that_does_not_fit_is_an_error_that_names_the_keys():
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.memory=auto: of 7\.34 GB free .* Set rollout\.vllm\.memory"):
        plan(VLLMConfig(), ROOMY, 7000 * MB)


def test_a_cpu_keeps_its_size():
    assert plan(VLLMConfig(), ROOMY, None) == MemoryPlan(1 << 30, sleeps=False)
    assert plan(VLLMConfig(memory=64, sleep="on"), ROOMY, None) == MemoryPlan(64 * MB, sleeps=True)


def test_needs_of_a_model_are_its_heads_layers_and_weights():
    """The 0.5B model of docs/gpu.md: 12,288 bytes of keys and values for a token in bf16."""
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    shapes = {"a": (1000, 10), "b": (7,)}
    options = {"rows": 3, "beside_training": True}
    needs = Needs.of(config, shapes, torch.bfloat16, row_tokens=612, ranks=1, **options)
    assert needs == Needs(12_288 * 612, 3, 2 * 10_007, 12 * 10_007, True)
    assert Needs.of(config, shapes, torch.bfloat16, row_tokens=0, ranks=2, **options).row == 6_144 * 2048


def test_the_key_of_earlier_versions_is_named():
    with pytest.raises(
        ConfigError, match=r"the key rollout\.vllm\.kv_cache_mb is now rollout\.vllm\.memory: write .*=64"
    ):
        compose(["experiment=quickstart", "+rollout.vllm.kv_cache_mb=64"], PluginManager.load())


@pytest.mark.parametrize("found", ["0.20.2", "0.20.2+cu130", "0.28.0", "0.32.0", "0.32.1"])
def test_supported_versions_are_taken(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    internals.check_version()


@pytest.mark.parametrize("found", ["0.19.1", "0.20.1", "0.33.0", "1.0.0", "0.1.dev1+g123"])
def test_other_versions_are_refused_by_name(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(ConfigError, match=r"is installed, but rlcore works with vLLM from 0\.20\.2 to before 0\.33"):
        internals.check_version()
