"""The Hugging Face rollout engine: what it samples, in which order it is asked, and what it reports."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.engine.rollout import Sampling
from rlcore.engines.hf.fused_decode import FusedDecodeStep
from rlcore.errors import DataError


@pytest.fixture(scope="module")
def rollout(make_rollout):
    return make_rollout()


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral-window", "gemma2"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 7}, {"top_p": 0.6}])
def test_log_probs_are_those_of_the_sampled_distribution(model_folder, kind, options, make_rollout, prompts):
    """Teacher forcing on the plain model, one row at a time, with temperature and cuts written out again."""
    batch = prompts(3, 2)
    out = make_rollout(kind).generate(batch, Sampling(max_tokens=12, **options))
    attention = "eager" if kind == "gemma2" else "sdpa"  # sdpa leaves its soft cap out
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32, attn_implementation=attention)
    for i in range(len(batch)):
        prompt, response = batch["prompts"][i], out["responses"][i]
        with torch.no_grad():
            logits = hf(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logits = logits / options.get("temperature", 1.0)
        for position, token in enumerate(response.tolist()):
            probs, order = logits[position].softmax(-1).sort(descending=True)
            kept = len(probs)
            if "top_k" in options:
                kept = options["top_k"]
            if "top_p" in options:
                kept = int((probs.cumsum(0) - probs < options["top_p"]).sum())
            assert token in order[:kept].tolist()
            want = probs[order.tolist().index(token)] / probs[:kept].sum()
            assert out["rollout_log_probs"][i][position].item() == pytest.approx(want.log().item(), abs=2e-4)


@pytest.mark.parametrize("kind", ["qwen2", "mistral-window"])
def test_greedy_equals_transformers_generate(model_folder, kind, make_rollout, prompts):
    batch = prompts(4, 1)
    out = make_rollout(kind).generate(batch, Sampling(max_tokens=10, temperature=0.0))
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32)
    for i in range(len(batch)):
        ids = batch["prompts"][i][None]
        want = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)[
            0, ids.shape[1] :
        ]
        assert out["responses"][i].tolist() == want.tolist()


def test_samples_do_not_depend_on_order_company_or_batch_size(rollout, make_rollout, prompts, tokens_of):
    batch, sampling = prompts(), Sampling(max_tokens=15)
    want = tokens_of(rollout.generate(batch, sampling))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    assert tokens_of(rollout.generate(batch[order], sampling)) == [want[i] for i in order]
    assert tokens_of(rollout.generate(batch[7:9], sampling)) == want[7:9]
    assert tokens_of(make_rollout(batch_size=3).generate(batch, sampling)) == want


def test_every_name_in_the_noise_makes_other_samples(rollout, prompts, tokens_of):
    batch = prompts(2, 2)
    plain = {"max_tokens": 15, "seed": 1, "step": 2, "purpose": "train", "call": 0}
    seen = [tokens_of(rollout.generate(batch, Sampling(**plain)))]
    for change in ({"seed": 2}, {"step": 3}, {"purpose": "eval"}, {"call": 1}):
        seen.append(tokens_of(rollout.generate(batch, Sampling(**{**plain, **change}))))
    for name, values in (("uid", ["1:0", "1:0", "1:1", "1:1"]), ("sample_index", torch.tensor([2, 3, 2, 3]))):
        other = prompts(2, 2)
        other[name] = values
        seen.append(tokens_of(rollout.generate(other, Sampling(**plain))))
    for i, a in enumerate(seen):
        assert a[0] != a[1], "the samples of one prompt must differ"
        for b in seen[i + 1 :]:
            assert all(x != y for x, y in zip(a, b, strict=True))


def test_responses_end_with_the_end_token_or_are_cut_off(rollout, prompts, tokens_of):
    out = rollout.generate(prompts(8, 8), Sampling(max_tokens=20))
    ended = 0
    for row, finished, length in zip(
        tokens_of(out), out["finished"].tolist(), out["response_length"].tolist(), strict=True
    ):
        assert len(row) == length <= 20
        assert 1 not in row[:-1]
        assert finished == (row[-1] == 1)
        assert finished or length == 20
        ended += finished
    assert 0 < ended < 64, "the model has to show both cases"
    assert torch.equal(out["response_mask"].values, torch.ones_like(out["responses"].values))
    assert out["weights_version"].tolist() == [0] * 64
    assert out["prompt_length"].tolist() == prompts(8, 8)["prompts"].lengths.tolist()


def test_no_response_ends_before_min_tokens(rollout, prompts):
    early = rollout.generate(prompts(8, 8), Sampling(max_tokens=20))["response_length"].min()
    late = rollout.generate(prompts(8, 8), Sampling(max_tokens=20, min_tokens=9))["response_length"].min()
    assert early < 9 <= late


def test_a_stop_string_ends_a_response_and_stays_in_it(rollout, model_folder, prompts, tokens_of):
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    free = rollout.generate(prompts(8, 8), Sampling(max_tokens=20))
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens_of(free)]
    stop = next(text[2:4] for text in texts if len(text) > 6 and text[2:4].isprintable())
    out = rollout.generate(prompts(8, 8), Sampling(max_tokens=20, stop=(stop,)))
    stopped = 0
    for before, row, finished in zip(texts, tokens_of(out), out["finished"].tolist(), strict=True):
        text = tokenizer.decode(row, skip_special_tokens=True)
        assert before.startswith(text)
        if stop in before:
            assert text == before[: before.index(stop) + len(stop)]
            assert finished
            stopped += 1
    assert stopped
    later = rollout.generate(prompts(8, 8), Sampling(max_tokens=20, min_tokens=12, stop=(stop,)))
    lengths = later["response_length"]
    assert 12 <= lengths.min() < 20, "a stop string among the first min_tokens tokens ends nothing"


def test_zero_rows_give_zero_rows(rollout, prompts):
    out = rollout.generate(prompts()[:0], Sampling(max_tokens=5))
    assert len(out) == 0
    assert "rollout_log_probs" in out


@pytest.fixture(params=["qwen2", "mistral-window"])
def counted(request, monkeypatch, make_rollout):
    """An engine, and how many rows each of its forwards gets: of a model with a fused step, and of one without."""
    rollout, rows = make_rollout(request.param), []
    forward, step = rollout.hf.forward, FusedDecodeStep.step
    monkeypatch.setattr(rollout.hf, "forward", lambda **kw: rows.append(len(kw["input_ids"])) or forward(**kw))
    monkeypatch.setattr(FusedDecodeStep, "step", lambda own, new, *args: rows.append(len(new)) or step(own, new, *args))
    return rollout, rows


def test_prompts_that_a_group_shares_are_prefilled_once(counted, prompts):
    rollout, rows = counted
    rollout.generate(prompts(5, 4), Sampling(max_tokens=6))
    assert rows[0] == 5
    assert 5 < rows[1] <= 20


def test_finished_rows_are_dropped_at_once(counted, prompts):
    rollout, rows = counted
    out = rollout.generate(prompts(8, 8), Sampling(max_tokens=150))
    lengths = out["response_length"]
    going = [int((lengths > position).sum()) for position in range(1, 150)]
    assert rows[1:] == [n for n in going if n]
    assert rows[1] > 2 * rows[-1]


def test_sync_takes_whole_weights_and_checks_their_names_before_any_changes(make_rollout):
    own = make_rollout()
    fresh = {name: torch.randn_like(p) for name, p in own.hf.named_parameters()}

    def sync(weights, version, announced=None):
        own.sync(iter(weights.items()), version, {n: tuple(t.shape) for n, t in (announced or weights).items()})

    sync(fresh, 3)
    assert own.version == 3
    assert all(torch.equal(p, fresh[name]) for name, p in own.hf.named_parameters())
    first, *rest = fresh
    zeros = {name: torch.zeros_like(tensor) for name, tensor in fresh.items()}
    poisoned = [
        ({**zeros, "nonsense": torch.zeros(1)}, "nonsense is unknown"),
        ({name: zeros[name] for name in rest}, f"{first} is missing"),
        ({**zeros, first: torch.zeros(1)}, rf"{first} has shape \[1\]"),
    ]
    for weights, message in poisoned:
        with pytest.raises(DataError, match=message):
            sync(weights, 4)
    assert own.version == 3
    assert all(torch.equal(p, fresh[name]) for name, p in own.hf.named_parameters())
    with pytest.raises(DataError, match=f"weights are missing: {first}"):
        sync({name: fresh[name] for name in rest}, 4, announced=fresh)
    with pytest.raises(DataError, match=rf"weight {first} has the unexpected shape \[1\]"):
        sync({**fresh, first: torch.zeros(1)}, 4, announced=fresh)
