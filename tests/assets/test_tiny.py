from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from benchmarks import make_tiny
from rlcore.assets import TINY
from rlcore.data.arithmetic import problems


def test_the_shipped_model_is_what_its_script_makes() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    fresh = make_tiny.make_model(make_tiny.make_tokenizer())
    assert isinstance(model, Qwen2ForCausalLM)
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 3e6
    assert model.dtype == torch.float32
    config = model.config
    assert (config.hidden_size // config.num_attention_heads, config.num_attention_heads) == (32, 4)
    assert config.num_key_value_heads == 2
    assert sum(path.stat().st_size for path in TINY.glob("*.safetensors")) <= 8e6
    assert (TINY / "README.md").is_file()


def test_the_tokenizer() -> None:
    text = "\n" + "".join(map(chr, range(32, 127)))
    for tokenizer in (AutoTokenizer.from_pretrained(TINY), PreTrainedTokenizerFast.from_pretrained(TINY)):
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(TINY).config.vocab_size
        token_ids = tokenizer.encode(text)
        assert len(token_ids) == len(set(token_ids)) == 96
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.decode(tokenizer.encode("Größe “8” \n\n  x")) == "Größe “8” \n\n  x"
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True)
        assert tokenizer.decode(chat["input_ids"]) == "<|user|>1+1=<|end|><|assistant|>"
    generation = AutoModelForCausalLM.from_pretrained(TINY).generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_it_knows_the_right_answers_and_seldom_gives_them() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    held_out = problems("eval")[:256]
    assert make_tiny.accuracy(model, tokenizer, held_out, temperature=0) >= 0.9
    for seed in range(3):
        assert 0.25 <= make_tiny.accuracy(model, tokenizer, held_out, temperature=1, seed=seed) <= 0.40


@pytest.mark.parametrize("right", ["7", "42", "155"])
def test_a_fixed_share_of_the_demonstrations_is_right(right: str) -> None:
    rng = random.Random(0)
    answers = [make_tiny.demonstration(right, 0.35, rng) for _ in range(6000)]
    # The share's standard deviation is sqrt(0.35 * 0.65 / 6000) = 0.006.
    assert abs(answers.count(right) / 6000 - 0.35) < 0.025
    wrong = [answer for answer in answers if answer != right]
    # All 9 wrong digits; of two and three digits most come with a single slip, so not every combination is drawn.
    assert len(set(wrong)) >= {1: 9, 2: 80, 3: 200}[len(right)]
    assert max(map(wrong.count, set(wrong))) < answers.count(right) / 3


def test_slips_make_up_the_wrong_share() -> None:
    # Two digits: each is right with probability 1 - 0.9 * slip, and both are with a quarter.
    assert make_tiny.slip_probability(2, 0.25) == pytest.approx(0.5 / 0.9)
    assert make_tiny.slip_probability(1, 0.55) == pytest.approx(0.5)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_training_learns_and_is_repeatable() -> None:
    def trained(steps: int) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        tokenizer = make_tiny.make_tokenizer()
        model = make_tiny.make_model(tokenizer)
        rng = random.Random(0)
        loss = make_tiny.train(model, tokenizer, steps=steps, batch_size=16, lr=2e-3, right_share=0.5, rng=rng)
        return loss, torch.cat([p.detach().flatten() for p in model.parameters()])

    (first, _), (loss, weights), (again, same) = trained(1), trained(15), trained(15)
    assert loss < first - 1.0
    assert loss == again
    assert torch.equal(weights, same)
