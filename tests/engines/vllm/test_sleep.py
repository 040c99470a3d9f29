"""vLLM asleep between two calls: the order of its calls, weights that have to come again, and the same rows after it.

On a CPU vLLM frees nothing when it sleeps, but pauses and resumes as on a GPU. test_on_gpu.py measures the memory.
"""

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Sampling
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.errors import ConfigError, DataError

SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def pair(make_pair):
    return make_pair("qwen2", True, config=VLLMConfig(memory=64, sleep="on"), beside_training=True)


def tokens(out):
    return [row.tolist() for row in out["responses"].to_list()]


@pytest.fixture
def calls(pair, monkeypatch):
    """Record sleeps, wakings and the names of loaded weights, in their order."""
    seen = []
    llm, model = pair.rollout.llm, pair.rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    sleep, wake, load = llm.sleep, llm.wake_up, model.load_weights
    monkeypatch.setattr(llm, "sleep", lambda level: [seen.append(f"sleep {level}"), sleep(level=level)])
    monkeypatch.setattr(llm, "wake_up", lambda tags: [seen.append(f"wake {tags}"), wake(tags=tags)])
    monkeypatch.setattr(model, "load_weights", lambda weights: [seen.append("load"), load(weights)])
    return seen


def test_weights_wake_before_they_are_loaded_and_the_cache_before_the_first_row(pair, prompts, calls):
    batch = prompts([20, 190], 2)
    assert pair.rollout.llm.llm_engine.is_sleeping(), "training measures its memory before the first rows"
    pair.draw(seed=1)
    pair.sync(1)
    assert calls == ["wake ['weights']", "load"]
    first = pair.rollout.generate(batch, SAMPLING)
    assert calls == ["wake ['weights']", "load", "wake ['kv_cache']"]
    again = pair.rollout.generate(batch, SAMPLING)  # a second call for the same weights: nothing sleeps by itself
    pair.rollout.sleep()
    assert calls[3:] == ["sleep 2"]
    pair.rollout.sleep()
    assert calls[3:] == ["sleep 2"], "it is asleep already"
    assert tokens(first) == tokens(again)


def test_asleep_it_has_no_version_and_samples_nothing_until_weights_come_again(pair, prompts):
    batch = prompts([20, 190], 2)
    pair.draw(seed=2)
    pair.sync(2)
    want = pair.rollout.generate(batch, SAMPLING)
    pair.rollout.sleep()
    assert pair.rollout.version == -1
    with pytest.raises(DataError, match="call sync before the first request"):
        pair.rollout.generate(batch, SAMPLING)
    pair.sync(2)
    out = pair.rollout.generate(batch, SAMPLING)
    assert tokens(out) == tokens(want)
    assert out["weights_version"].tolist() == [2] * len(batch)


def test_keys_and_values_of_the_time_before_are_not_used_again(pair, prompts, greedy):
    """Prompts of more than a block of the prefix cache, with other weights after each sleep."""
    batch, seen = prompts([190, 300], 1), []
    for version in (3, 4):
        pair.draw(seed=version)
        pair.sync(version)
        answers = tokens(pair.rollout.generate(batch, greedy))
        for prompt, answer in zip(batch["prompts"].to_list(), answers, strict=True):
            ids = prompt[None]
            out = pair.hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert answer == out[0, len(prompt) :].tolist()
        seen.append(answers)
        pair.rollout.sleep()
    assert seen[0] != seen[1]


def test_a_refused_update_leaves_it_asleep_and_a_whole_one_wakes_it(pair, prompts):
    weights = pair.weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    del weights["model.norm.weight"]
    with pytest.raises(DataError, match=r"model\.norm\.weight is missing"):
        pair.rollout.sync(
            iter(weights.items()), 5, {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
        )
    assert pair.rollout.llm.llm_engine.is_sleeping()
    pair.sync(5)
    assert len(pair.rollout.generate(prompts([20], 2), SAMPLING)) == 2


def test_half_awake_after_a_refused_row_it_sleeps_whole(pair, prompts, calls):
    """The weights woke for `sync`, and the cache not: the row was refused before."""
    pair.rollout.sleep()
    calls.clear()
    pair.draw(seed=9)
    pair.sync(9)
    with pytest.raises(DataError, match="vLLM has room for"):
        pair.rollout.generate(prompts([20], 1), Sampling(max_tokens=10_000))
    pair.rollout.sleep()
    assert calls == ["wake ['weights']", "load", "wake ['kv_cache']", "sleep 2"]
    executor = pair.rollout.llm.llm_engine.model_executor
    assert executor.sleeping_tags >= {"weights", "kv_cache"}
    pair.sync(9)
    assert len(pair.rollout.generate(prompts([20], 2), SAMPLING)) == 2


def test_after_a_failed_step_it_sleeps_and_its_next_rows_are_the_same(pair, prompts, monkeypatch):
    batch = prompts([20, 190], 2)
    pair.draw(seed=10)
    pair.sync(10)
    want = tokens(pair.rollout.generate(batch, SAMPLING))
    step, seen = pair.rollout.step, []

    def fail():
        seen.append(step())
        if len(seen) == 3:
            raise RuntimeError("a step failed")
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(pair.rollout, "step", fail)
        with pytest.raises(RuntimeError, match="a step failed"):
            pair.rollout.generate(batch, SAMPLING)
    assert not pair.rollout.in_flight
    pair.rollout.sleep()
    assert pair.rollout.llm.llm_engine.is_sleeping()
    pair.sync(11)
    assert tokens(pair.rollout.generate(batch, SAMPLING)) == want


def test_sleeping_rows_are_refused(pair, prompts):
    from rlcore.engine.rollout import Request

    pair.sync(6)
    pair.rollout.add([Request("a", (5, 6, 7), 1, SAMPLING)])
    with pytest.raises(DataError, match="1 requests are in flight"):
        pair.rollout.sleep()
    pair.rollout.abort(["a"])


def test_metrics_are_the_seconds_and_the_gigabytes_of_the_last_sleep(pair, prompts):
    pair.sync(7)
    pair.rollout.generate(prompts([20], 1), SAMPLING)
    pair.rollout.sleep()
    assert pair.rollout.metrics["time/rollout_wake"] == 0.0
    pair.sync(8)
    pair.rollout.generate(prompts([20], 1), SAMPLING)
    metrics = pair.rollout.metrics
    assert metrics["time/rollout_sleep"] > 0
    assert metrics["time/rollout_wake"] > 0
    assert metrics["memory/rollout_sleep_freed_gb"] == 0.0  # a CPU


def test_a_pool_of_its_own_does_not_sleep(make_model, tmp_path):
    from rlcore.engines.vllm.rollout import VLLMRollout

    folder = make_model(tmp_path / "model", "qwen2", tied=True)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.sleep=on frees memory for training"):
        VLLMRollout(ModelConfig(path=str(folder)), config=VLLMConfig(memory=64, sleep="on"), device=torch.device("cpu"))
