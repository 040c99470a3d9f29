"""The Hugging Face rollout engine: what it samples, in which order it is asked, and what it reports."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Sampling
from rlcore.engines.hf.fused_decode import FusedDecodeStep
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged

CPU = torch.device("cpu")


def engine(folder, batch_size=64, shared=None):
    rollout = HFRollout(ModelConfig(path=str(folder)), batch_size=batch_size, device=CPU, shared=shared)
    rollout.version = 0
    return rollout


@pytest.fixture(scope="module")
def rollout(model_folder):
    return engine(model_folder())


def prompts(groups=5, size=4):
    generator = torch.Generator().manual_seed(11)
    made = [
        torch.randint(5, 90, (int(n),), generator=generator)
        for n in torch.randint(1, 9, (groups,), generator=generator)
    ]
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([p for p in made for _ in range(size)]),
            "uid": [f"0:{i}" for i in range(groups) for _ in range(size)],
            "sample_index": torch.arange(size).repeat(groups),
        }
    )


def tokens(out):
    return [row.tolist() for row in out["responses"].to_list()]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral-window", "gemma2"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 7}, {"top_p": 0.6}])
def test_log_probs_are_those_of_the_sampled_distribution(model_folder, kind, options):
    """Teacher forcing on the plain model, one row at a time, with temperature and cuts written out again."""
    batch = prompts(3, 2)
    out = engine(model_folder(kind)).generate(batch, Sampling(max_tokens=12, **options))
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32)
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
def test_greedy_equals_transformers_generate(model_folder, kind):
    batch = prompts(4, 1)
    out = engine(model_folder(kind)).generate(batch, Sampling(max_tokens=10, temperature=0.0))
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32)
    for i in range(len(batch)):
        ids = batch["prompts"][i][None]
        want = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)[
            0, ids.shape[1] :
        ]
        assert out["responses"][i].tolist() == want.tolist()


def test_samples_do_not_depend_on_order_company_or_batch_size(rollout, model_folder):
    batch, sampling = prompts(), Sampling(max_tokens=15)
    want = tokens(rollout.generate(batch, sampling))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    assert tokens(rollout.generate(batch[order], sampling)) == [want[i] for i in order]
    assert tokens(rollout.generate(batch[7:9], sampling)) == want[7:9]
    assert tokens(engine(model_folder(), batch_size=3).generate(batch, sampling)) == want


def test_every_name_in_the_noise_makes_other_samples(rollout):
    batch = prompts(2, 2)
    plain = {"max_tokens": 15, "seed": 1, "step": 2, "purpose": "train", "call": 0}
    seen = [tokens(rollout.generate(batch, Sampling(**plain)))]
    for change in ({"seed": 2}, {"step": 3}, {"purpose": "eval"}, {"call": 1}):
        seen.append(tokens(rollout.generate(batch, Sampling(**{**plain, **change}))))
    for name, values in (("uid", ["1:0", "1:0", "1:1", "1:1"]), ("sample_index", torch.tensor([2, 3, 2, 3]))):
        other = prompts(2, 2)
        other[name] = values
        seen.append(tokens(rollout.generate(other, Sampling(**plain))))
    for i, a in enumerate(seen):
        assert a[0] != a[1], "the samples of one prompt must differ"
        for b in seen[i + 1 :]:
            assert all(x != y for x, y in zip(a, b, strict=True))


def test_responses_end_with_the_end_token_or_are_cut_off(rollout):
    out = rollout.generate(prompts(8, 8), Sampling(max_tokens=20))
    ended = 0
    for row, finished, length in zip(
        tokens(out), out["finished"].tolist(), out["response_length"].tolist(), strict=True
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


def test_no_response_ends_before_min_tokens(rollout):
    early = rollout.generate(prompts(8, 8), Sampling(max_tokens=20))["response_length"].min()
    late = rollout.generate(prompts(8, 8), Sampling(max_tokens=20, min_tokens=9))["response_length"].min()
    assert early < 9 <= late


def test_a_stop_string_ends_a_response_and_stays_in_it(rollout, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    free = rollout.generate(prompts(8, 8), Sampling(max_tokens=20))
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens(free)]
    stop = next(text[2:4] for text in texts if len(text) > 6 and text[2:4].isprintable())
    out = rollout.generate(prompts(8, 8), Sampling(max_tokens=20, stop=(stop,)))
    stopped = 0
    for before, row, finished in zip(texts, tokens(out), out["finished"].tolist(), strict=True):
        text = tokenizer.decode(row, skip_special_tokens=True)
        assert before.startswith(text)
        if stop in before:
            assert text == before[: before.index(stop) + len(stop)]
            assert finished
            stopped += 1
    assert stopped


def test_zero_rows_give_zero_rows(rollout):
    out = rollout.generate(prompts()[:0], Sampling(max_tokens=5))
    assert len(out) == 0
    assert "rollout_log_probs" in out


@pytest.fixture(params=["qwen2", "mistral-window"])
def counted(request, model_folder, monkeypatch):
    """An engine, and how many rows each of its forwards gets: of a model with a lean step, and of one without."""
    rollout, rows = engine(model_folder(request.param)), []
    forward, step = rollout.hf.forward, FusedDecodeStep.step
    monkeypatch.setattr(rollout.hf, "forward", lambda **kw: rows.append(len(kw["input_ids"])) or forward(**kw))
    monkeypatch.setattr(FusedDecodeStep, "step", lambda own, new, *args: rows.append(len(new)) or step(own, new, *args))
    return rollout, rows


def test_prompts_that_a_group_shares_are_prefilled_once(counted):
    rollout, rows = counted
    rollout.generate(prompts(5, 4), Sampling(max_tokens=6))
    assert rows[0] == 5
    assert 5 < rows[1] <= 20


def test_finished_rows_are_dropped_at_once(counted):
    rollout, rows = counted
    out = rollout.generate(prompts(8, 8), Sampling(max_tokens=150))
    lengths = out["response_length"]
    going = [int((lengths > position).sum()) for position in range(1, 150)]
    assert rows[1:] == [n for n in going if n]
    assert rows[1] > 2 * rows[-1]


def test_a_model_without_a_fused_step_says_so_once_and_one_that_is_off_is_found(model_folder, caplog, monkeypatch):
    with caplog.at_level("INFO", "rlcore.engines.hf.fused_decode"):
        engine(model_folder("qwen2"))
        assert not caplog.records
        engine(model_folder("mistral-window"))
        assert "no fast form of sliding_attention is known" in caplog.text
        monkeypatch.setattr(torch.Tensor, "roll", lambda values, *_: -values)
        assert engine(model_folder("qwen2"))._fused is None
        assert "its log-probs would be off by" in caplog.text


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_step_is_the_modules_own(model_folder, kind, dtype):
    """In bf16 it rounds where autocast does."""
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32).eval()
    before = {name: parameter.clone() for name, parameter in hf.named_parameters()}
    lean = FusedDecodeStep.of(hf, dtype)
    assert lean is not None
    assert all(torch.equal(before[name], parameter) for name, parameter in hf.named_parameters())
    assert lean.probe() < (1e-5 if dtype is torch.float32 else 1e-2)


def test_the_fused_step_follows_the_weights(model_folder):
    """An update in place, as of an optimizer, is seen without a word: there is no copy to be stale."""
    hf = AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), dtype=torch.float32).eval()
    rollout = engine(model_folder("qwen2"), shared=hf)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    assert rollout._fused.probe() < 1e-5
    batch = prompts(3, 1)
    out = rollout.generate(batch, Sampling(max_tokens=9, temperature=0.0))
    assert rollout._fused._weights == rollout._fused._head == [], "nothing is held while the module trains"
    for prompt, response in zip(batch["prompts"].to_list(), out["responses"].to_list(), strict=True):
        ids = torch.cat([prompt, response])[None]
        with torch.no_grad():
            assert hf(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == response.tolist()


def test_sync_takes_whole_weights_and_checks_their_names_before_any_changes(rollout, model_folder):
    own = engine(model_folder())
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


def test_a_shared_module_goes_back_to_its_training_state(make_engine, model_folder):
    train = make_engine(activation_checkpointing=True)
    rollout = engine(model_folder(), shared=train.shared_module)
    module = train.shared_module
    modes = [each.training for each in module.modules()]
    assert any(modes)
    assert not all(modes)
    before = module.config._attn_implementation
    rollout.generate(prompts(2, 2), Sampling(max_tokens=4))
    assert [each.training for each in module.modules()] == modes
    assert module.config._attn_implementation == before == "rlcore_packed"
