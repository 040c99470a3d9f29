"""Weights taken over in place: after each update vLLM answers as transformers does with the same weights."""

import pytest
import torch

from rlcore.engine.rollout import Sampling
from rlcore.errors import DataError

MODELS = [("qwen2", True), ("qwen2", False), ("llama", True), ("llama", False)]
LENGTHS = [20, 190]  # less than a block of vLLM's prefix cache (128 tokens on the CPU), and more


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{'tied' if model[1] else 'untied'}")
def pair(request, make_pair):
    return make_pair(*request.param)


def transformers_greedy(pair, batch, tokens):
    answers = []
    for prompt in batch["prompts"].to_list():
        ids = prompt[None]
        out = pair.hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def vllm_greedy(pair, batch, sampling):
    return [row.tolist() for row in pair.rollout.generate(batch, sampling)["responses"].to_list()]


def test_each_of_three_updates_answers_as_transformers_does(pair, prompts, greedy):
    batch, seen = prompts(LENGTHS, 2), []
    for version in (1, 2, 3):
        pair.draw(seed=version)
        pair.sync(version)
        answers = vllm_greedy(pair, batch, greedy)
        assert answers == transformers_greedy(pair, batch, greedy.max_tokens)
        assert answers not in seen
        seen.append(answers)
        for temperature in (1.0, 0.7):
            out = pair.rollout.generate(batch, Sampling(max_tokens=12, temperature=temperature, step=version))
            assert out["weights_version"].tolist() == [version] * len(batch)
            for row in range(len(batch)):
                response = out["responses"][row]
                every = pair.log_probs(batch["prompts"][row], response, temperature)
                torch.testing.assert_close(
                    out["rollout_log_probs"][row], every.gather(-1, response[:, None])[:, 0], atol=1e-4, rtol=0
                )


def dropped(weights):
    del weights["model.layers.1.self_attn.k_proj.weight"]


def unknown(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(256, 128)


def misshapen(weights):
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(128, 128)


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (dropped, r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"),
        (unknown, r"model\.layers\.2\.mlp\.up_proj\.weight is unknown"),
        (misshapen, r"model\.layers\.0\.mlp\.down_proj\.weight has shape \[128, 128\], not \[128, 256\]"),
    ],
)
def test_a_poisoned_update_is_refused_and_the_old_weights_go_on_answering(pair, prompts, greedy, poison, message):
    batch = prompts(LENGTHS, 1)
    pair.draw(seed=4)
    pair.sync(4)
    before = vllm_greedy(pair, batch, greedy)
    assert before == transformers_greedy(pair, batch, greedy.max_tokens)
    pair.draw(seed=5)
    weights = pair.weights()
    poison(weights)
    with pytest.raises(DataError, match=message):
        pair.rollout.sync(iter(weights.items()), 5, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    assert pair.rollout.version == 4
    assert vllm_greedy(pair, batch, greedy) == before
    pair.sync(5)  # the whole of it is taken
    assert vllm_greedy(pair, batch, greedy) == transformers_greedy(pair, batch, greedy.max_tokens) != before


def test_an_update_that_breaks_off_leaves_an_engine_that_does_not_answer(pair, prompts, greedy):
    pair.sync(6)
    weights = pair.weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with pytest.raises(DataError, match="weights are missing"):
        pair.rollout.sync(iter(list(weights.items())[:-1]), 7, shapes)
    with pytest.raises(DataError, match="call sync before the first request"):
        pair.rollout.generate(prompts(LENGTHS, 1), greedy)
    pair.sync(7)
    assert vllm_greedy(pair, prompts(LENGTHS, 1), greedy)
