"""What vLLM samples, and that a batch of it says the same as one of the Hugging Face engine."""

import re

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Sampling
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(make_pair):
    pair = make_pair("qwen2", True)
    pair.draw(seed=1)
    pair.weights()["model.norm.weight"].mul_(0.3)  # flatter, so that samples differ and some end early
    pair.sync(1)
    return pair


@pytest.fixture(scope="module")
def rollout(pair):
    return pair.rollout


@pytest.fixture(scope="module")
def hf(pair):
    engine = HFRollout(ModelConfig(path=str(pair.folder)), batch_size=64, device=CPU, shared=pair.hf)
    engine.version = 1
    return engine


def tokens(out):
    return [row.tolist() for row in out["responses"].to_list()]


def test_samples_do_not_depend_on_order_or_company(rollout, prompts):
    batch, sampling = prompts([3, 20, 190], 4), Sampling(max_tokens=15)
    want = tokens(rollout.generate(batch, sampling))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    assert tokens(rollout.generate(batch[order], sampling)) == [want[i] for i in order]
    assert tokens(rollout.generate(batch[5:7], sampling)) == want[5:7]
    assert len({tuple(row) for row in want}) == len(want), "the samples of one prompt must differ"


def test_every_name_in_the_seed_makes_other_samples(rollout, prompts):
    plain = {"max_tokens": 15, "seed": 1, "step": 2, "purpose": "train", "call": 0}
    seen = [tokens(rollout.generate(prompts([20], 2), Sampling(**plain)))]
    for change in ({"seed": 2}, {"step": 3}, {"purpose": "eval"}, {"call": 1}):
        seen.append(tokens(rollout.generate(prompts([20], 2), Sampling(**{**plain, **change}))))
    rows = [tuple(row) for each in seen for row in each]
    assert len(set(rows)) == len(rows)


def test_tokens_follow_the_distribution_that_the_log_probs_state(rollout, pair, prompts):
    """2000 first tokens, by chi-squared over the 20 likeliest and the rest; of more prompts than one forward takes."""
    batch = prompts([20], 2000)
    first = torch.tensor([row[0] for row in tokens(rollout.generate(batch, Sampling(max_tokens=1)))])
    probs = pair.log_probs(batch["prompts"][0], first[:1], 1.0)[0].exp()
    likeliest = probs.topk(20).indices
    counts = torch.stack([(first == token).sum() for token in likeliest]).double()
    expected = 2000 * probs[likeliest].double()
    counts, expected = (torch.cat([each, 2000 - each.sum()[None]]) for each in (counts, expected))
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 45.3  # of 20 degrees of freedom, exceeded once in 1000


@pytest.mark.parametrize("options", [{"top_k": 7, "temperature": 1.3}, {"top_p": 0.6}, {"min_tokens": 9}])
def test_log_probs_are_those_of_the_cut_distribution(rollout, pair, prompts, options):
    batch = prompts([20, 190], 2)
    out = rollout.generate(batch, Sampling(max_tokens=12, **options))
    for row in range(len(batch)):
        response = out["responses"][row]
        every = pair.log_probs(batch["prompts"][row], response, options.get("temperature", 1.0))
        for position, token in enumerate(response.tolist()):
            at = every[position].clone()
            if position < options.get("min_tokens", 0):
                at[1] = -torch.inf
            probs, order = at.softmax(-1).sort(descending=True)
            kept = options.get("top_k", len(probs))
            if "top_p" in options:
                kept = int((probs.cumsum(0) - probs < options["top_p"]).sum())
            assert token in order[:kept].tolist()
            want = probs[order.tolist().index(token)] / probs[:kept].sum()
            assert out["rollout_log_probs"][row][position].item() == pytest.approx(want.log().item(), abs=2e-4)


def test_a_batch_says_the_same_as_the_hugging_face_engines(rollout, hf, prompts, greedy):
    """Greedy, so that both have the same tokens: every column, with and without what ends a response."""
    batch = prompts([3, 20, 60, 190], 1)
    tokenizer = hf.tokenizer
    free = tokens(hf.generate(batch, Sampling(max_tokens=30, temperature=0.0)))
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in free]
    stops = tuple(match[0] for text in texts if (match := re.search(r"[ -~]{2}", text[1:])))
    assert stops
    for options in ({}, {"stop": stops}, {"stop": stops, "min_tokens": 3}, {"stop": stops, "min_tokens": 8}):
        sampling = Sampling(max_tokens=30, temperature=0.0, **options)
        ours, theirs = rollout.generate(batch, sampling), hf.generate(batch, sampling)
        assert set(ours.batch.keys()) == set(theirs.batch.keys())
        for name in ("responses", "response_mask", "rollout_log_probs"):
            assert [row.tolist() for row in ours[name].to_list()] == [row.tolist() for row in theirs[name].to_list()]
            assert ours[name].values.dtype == theirs[name].values.dtype
        for name in ("response_length", "prompt_length", "finished", "weights_version"):
            assert torch.equal(ours[name], theirs[name]), name
        assert ours["response_text"].tolist() == theirs["response_text"].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 30}, {"top_p": 0.8}, {"min_tokens": 9}])
def test_samples_are_those_of_the_hugging_face_engine(rollout, hf, prompts, options):
    """The same noise by name drives both; their log-probs differ only by rounding."""
    batch, sampling = prompts([3, 20, 60, 190], 3), Sampling(max_tokens=15, **options)
    ours, theirs = rollout.generate(batch, sampling), hf.generate(batch, sampling)
    assert tokens(ours) == tokens(theirs)
    torch.testing.assert_close(ours["rollout_log_probs"].values, theirs["rollout_log_probs"].values, atol=2e-4, rtol=0)


def test_a_stop_string_ends_a_response_and_stays_in_it(rollout, prompts):
    free = rollout.generate(prompts([20, 30], 16), Sampling(max_tokens=20))
    stop = next(text[2:4] for text in free["response_text"] if len(text) > 6 and text[2:4].isprintable())
    out = rollout.generate(prompts([20, 30], 16), Sampling(max_tokens=20, stop=(stop,)))
    stopped = 0
    for before, text, finished in zip(free["response_text"], out["response_text"], out["finished"], strict=True):
        assert before.startswith(text)
        if stop in before:
            assert text == before[: before.index(stop) + len(stop)]
            assert finished
            stopped += 1
    assert stopped


def test_responses_end_with_the_end_token_or_are_cut_off(rollout, prompts):
    out = rollout.generate(prompts([8] * 8, 16), Sampling(max_tokens=60))
    ended = 0
    for row, finished in zip(tokens(out), out["finished"].tolist(), strict=True):
        assert 1 not in row[:-1]
        assert finished == (row[-1] == 1)
        assert finished or len(row) == 60
        ended += finished
    assert 0 < ended < 128, "the model has to show both cases"


def test_no_response_ends_before_min_tokens(rollout, prompts):
    early = rollout.generate(prompts([8] * 8, 16), Sampling(max_tokens=60))["response_length"].min()
    late = rollout.generate(prompts([8] * 8, 16), Sampling(max_tokens=60, min_tokens=40))["response_length"].min()
    assert early < 40 <= late


def test_the_samples_of_a_prompt_share_its_prefill(rollout, prompts, monkeypatch):
    """Also where they are mixed in the batch: all but one of each prompt find its whole blocks of 128 tokens."""
    batch = prompts([300, 310], 4, seed=99)[[0, 4, 1, 5, 2, 6, 3, 7]]
    cached = []
    engine = rollout.llm.llm_engine
    step = engine.step

    def spy():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(engine, "step", spy)
    rollout.generate(batch, Sampling(max_tokens=4))
    assert sorted(cached) == [0] * 2 + [256] * 6


def test_long_prompts_are_prefilled_in_chunks_and_sampled_as_alone(rollout, prompts):
    """More tokens than vLLM takes in one step: a prompt whose chunk ends within it draws nothing that counts."""
    most = rollout.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    batch, sampling = prompts([450 + row for row in range(most // 450 + 2)], 1, seed=5), Sampling(max_tokens=5)
    together = tokens(rollout.generate(batch, sampling))
    assert together == [tokens(rollout.generate(batch[row : row + 1], sampling))[0] for row in range(len(batch))]


def test_the_process_keeps_its_random_state_and_its_threads(pair, prompts, process_state):
    assert pair.before == pair.after
    before = process_state()
    pair.rollout.generate(prompts([20], 2), Sampling(max_tokens=4))
    assert process_state() == before
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_what_does_not_fit_is_refused_and_no_rows_give_no_rows(rollout, prompts):
    with pytest.raises(DataError, match="make 520, but vLLM has room for 512"):
        rollout.generate(prompts([500], 1), Sampling(max_tokens=20))
    out = rollout.generate(prompts([20], 1)[:0], Sampling(max_tokens=5))
    assert len(out) == 0
    assert "rollout_log_probs" in out
