"""Decoding in slots: the same rows as the plain step gives, and a step that a GPU can replay."""

import random
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Request, Sampling
from rlcore.engine.sampling import sample_tokens
from rlcore.engines.hf import slot_rows
from rlcore.engines.hf.cache import BufferedCache
from rlcore.engines.hf.fused_decode import FusedDecodeStep, rotary_tables
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.hf.slot_rows import SlotRows, capturable, probe
from rlcore.engines.hf.static_decode import (
    Slots,
    StaticStep,
    StepWeights,
    draw_in_blocks,
    flash_attention,
    masked_attention,
)

CPU = torch.device("cpu")


def engine(folder, *, in_slots, batch_size=64):
    """An engine whose slots, on a CPU, run the step as it is written."""
    rollout = HFRollout(ModelConfig(path=str(folder)), batch_size=batch_size, device=CPU, shared=None)
    rollout.version = 0
    if in_slots:
        rollout._slots = SlotRows(
            rollout.hf, rollout.dtype, rollout.end_ids, rollout.tokenizer, capture=False, compiled=False
        )
    return rollout


def requests(sampling, count=20, prompts=5, *, seed=3):
    numbers = random.Random(seed)
    made = [tuple(numbers.randrange(5, 90) for _ in range(numbers.randrange(1, 12))) for _ in range(prompts)]
    return [Request(str(i), made[i % prompts], 7919 * i + 1, sampling) for i in range(count)]


def sampled(rollout, wanted):
    """Return all rows by id."""
    rollout.add(wanted)
    rows = []
    while rollout.in_flight:
        rows += rollout.step()
    return {row.id: row for row in rows}


def assert_same_rows(got, want):
    assert got.keys() == want.keys()
    for name, row in want.items():
        assert (got[name].tokens, got[name].reason) == (row.tokens, row.reason)
        assert got[name].log_probs == pytest.approx(row.log_probs, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_rows_are_those_of_the_plain_step_whenever_they_are_admitted(model_folder, kind):
    wanted = requests(Sampling(max_tokens=40))
    plain = sampled(engine(model_folder(kind), in_slots=False), wanted)
    assert len({len(row.tokens) for row in plain.values()}) > 5
    assert_same_rows(sampled(engine(model_folder(kind), in_slots=True), wanted), plain)
    assert_same_rows(sampled(engine(model_folder(kind), in_slots=True, batch_size=3), wanted), plain)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.4, "top_k": 7}, {"top_p": 0.6}, {"min_tokens": 9}]
)
def test_rows_are_those_of_the_plain_step_whatever_is_sampled(model_folder, options):
    wanted = requests(Sampling(max_tokens=20, **options))
    plain = sampled(engine(model_folder(), in_slots=False), wanted)
    assert_same_rows(sampled(engine(model_folder(), in_slots=True, batch_size=11), wanted), plain)


def test_a_stop_string_between_two_looks_ends_a_row_where_the_plain_step_does(model_folder):
    free = sampled(engine(model_folder(), in_slots=False), requests(Sampling(max_tokens=30)))
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    texts = [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in free.values()]
    stop = next(text[2:4] for text in texts if len(text) > 6 and text[2:4].isprintable())
    for few in (0, 6):
        wanted = requests(Sampling(max_tokens=30, stop=(stop,), min_tokens=few))
        plain = sampled(engine(model_folder(), in_slots=False), wanted)
        assert few or any(row.reason == "stop" for row in plain.values())
        assert_same_rows(sampled(engine(model_folder(), in_slots=True, batch_size=7), wanted), plain)


@pytest.mark.parametrize("in_slots", [False, True])
def test_long_prompts_run_in_parts_and_each_once(model_folder, monkeypatch, in_slots):
    wanted = requests(Sampling(max_tokens=12), count=30, prompts=10)
    longest = max(len(each.prompt) for each in wanted)
    whole = sampled(engine(model_folder(), in_slots=in_slots), wanted)
    rollout, shapes = engine(model_folder(), in_slots=in_slots), []
    rollout.hf.register_forward_pre_hook(lambda _, __, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    monkeypatch.setattr("rlcore.engines.hf.rollout.PREFILL_TOKENS", 3 * longest + 2)
    in_parts = sampled(rollout, wanted)
    assert shapes == [(3, longest)] * 3 + [(1, longest)], "ten prompts, each once"
    assert_same_rows(in_parts, whole)
    monkeypatch.setattr("rlcore.engines.hf.rollout.PREFILL_TOKENS", 1)
    assert_same_rows(sampled(engine(model_folder(), in_slots=in_slots), wanted), whole)


def test_requests_of_other_distributions_and_lengths_wait_until_the_slots_are_free(model_folder):
    wanted = requests(Sampling(max_tokens=20))
    for index, sampling in ((4, Sampling(max_tokens=20, temperature=0.5)), (9, Sampling(max_tokens=300, min_tokens=2))):
        wanted[index] = Request(str(index), wanted[index].prompt, wanted[index].key, sampling)
    plain = sampled(engine(model_folder(), in_slots=False), wanted)
    assert_same_rows(sampled(engine(model_folder(), in_slots=True, batch_size=6), wanted), plain)


def test_an_aborted_row_continues_where_it_was(model_folder):
    wanted = requests(Sampling(max_tokens=40))
    want = sampled(engine(model_folder(), in_slots=False), wanted)
    rollout = engine(model_folder(), in_slots=True, batch_size=8)
    rollout.add(wanted)
    rows = {row.id: row for row in rollout.step()}
    gone = list(rollout.in_flight)[::2]
    aborted = {row.id: row for row in rollout.abort(gone)}
    assert {row.reason for row in aborted.values()} == {"abort"}
    assert any(row.tokens for row in aborted.values())
    assert any(not row.tokens for row in aborted.values()), "some were still waiting"
    again = {each.id: each for each in wanted if each.id in aborted}
    for name, row in aborted.items():
        each = again[name]
        again[name] = Request(each.id, each.prompt, each.key, each.sampling, tuple(row.tokens), tuple(row.log_probs))
    rows.update(sampled(rollout, list(again.values())))
    assert_same_rows(rows, want)


def test_slots_follow_the_weights(model_folder):
    rollout, wanted = engine(model_folder(), in_slots=True), requests(Sampling(max_tokens=9, temperature=0.0))
    before = sampled(rollout, wanted)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in rollout.hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    after = sampled(rollout, wanted)
    rollout._slots = None
    assert_same_rows(after, sampled(rollout, wanted))
    assert any(after[name].tokens != before[name].tokens for name in before)


def test_slots_use_weights_of_their_dtype_in_place_and_follow_replaced_ones(model_folder):
    rollout, wanted = engine(model_folder("llama"), in_slots=True), requests(Sampling(max_tokens=9, temperature=0.0))
    sampled(rollout, wanted)
    kept = rollout._slots._weights._copies
    assert all(own.data_ptr() == parameter.data_ptr() for own, parameter in kept)
    assert {parameter.data_ptr() for _, parameter in kept} == {each.data_ptr() for each in rollout.hf.parameters()}
    torch.manual_seed(0)
    new = [(name, each.detach() + torch.randn_like(each) * 0.05) for name, each in rollout.hf.named_parameters()]
    rollout.adopt(iter(new), 1, rollout.shapes)
    after = sampled(rollout, wanted)
    rollout._slots = None
    assert_same_rows(after, sampled(rollout, wanted))
    in_bf16 = StepWeights(rollout.hf, torch.bfloat16)
    copied = sum(own.data_ptr() != parameter.data_ptr() for own, parameter in in_bf16._copies)
    assert copied == 2 * 7 + 1, "only the products of the two layers, and the head, are in bf16"


def static_step(hf, slots, width, *, dtype=torch.float32, attention=masked_attention, device=CPU, compiled=False):
    weights = StepWeights(hf, dtype)
    weights.refresh()
    base = getattr(hf, hf.base_model_prefix)
    buffers = Slots(slots, width, 16, weights, device)
    ends = torch.tensor([1, 2], device=device)
    return StaticStep(buffers, weights, rotary_tables(base, width, device), ends, attention, compiled=compiled)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_those_of_the_fused_step_to_the_bit(model_folder, kind, dtype):
    """Where all slots are full, so that both attend to the same columns; elsewhere zeros are added in another order."""
    hf = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32).eval()
    fused, rows, width = FusedDecodeStep(hf, dtype), 6, 13
    fused.prepare(width, CPU)
    step = static_step(hf, rows, width, dtype=dtype)
    slots, cache = step.slots, BufferedCache(len(step.weights.layers), width)
    numbers = torch.Generator().manual_seed(4)
    for layer, kept in zip(cache.layers, slots.cache, strict=True):
        states = torch.randn(2, rows, step.weights.heads.keys, width - 1, step.weights.heads.size, generator=numbers)
        layer.update(*states.to(dtype))
        kept[:, :-1] = states.to(dtype).permute(1, 3, 0, 2, 4)
    tokens = torch.arange(rows) + 5
    slots.tokens[:], slots.positions[:] = tokens, width - 1
    mask = torch.zeros(rows, width)
    assert torch.equal(step.logits(rows), fused.step(tokens[:, None], slots.positions[:, None], mask[:, None], cache))


@torch.no_grad()
def test_a_step_has_no_shape_that_changes_and_does_not_wait_for_the_host(model_folder):
    """It traces as one graph, which a conversion to a number or a branch on one would break, and only once."""
    hf = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()
    step, traced = static_step(hf, 4, 32), []
    step.slots.ended[:3], step.slots.limit[:], step.slots.noise[:] = False, 7, 0.5

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    run = torch.compile(
        lambda: step(4, lambda x, u: draw_in_blocks(x, u, 0.7), bans=True), fullgraph=True, backend=backend
    )
    for _ in range(9):
        run()
    assert len(traced) == 1
    assert step.slots.count.tolist() == [7, 7, 7, 0] or step.slots.by_itself.any()
    torch._dynamo.reset()


@torch.no_grad()
def test_compiled_pieces_give_the_logits_of_the_plain_step(model_folder, monkeypatch):
    """Traced as torch.compile traces them, in one graph each, and run without a compiler."""
    traced, compiler = [], torch.compile

    def in_one_graph(function):
        traced.append(function.__name__)
        return compiler(function, backend="eager", fullgraph=True)

    hf = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()
    monkeypatch.setattr(torch, "compile", in_one_graph)
    plain, compiled = (static_step(hf, 4, 32, compiled=each) for each in (False, True))
    for step in (plain, compiled):
        step.slots.tokens[:], step.slots.positions[:] = torch.arange(4) + 5, torch.tensor([0, 3, 7, 30])
    assert torch.equal(plain.logits(4), compiled.logits(4))
    assert traced == ["first_layer", "between_layers", "last_layer"]
    torch._dynamo.reset()


@torch.no_grad()
def test_a_step_in_bf16_with_the_flash_kernel_stays_on_its_device(model_folder):
    """On the meta device, which needs no GPU: a tensor made on the CPU, or of a dtype that does not go, is an error."""
    config = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).config
    meta = torch.device("meta")
    with meta:
        hf = AutoModelForCausalLM.from_config(config)
    step = static_step(hf, 4, 32, dtype=torch.bfloat16, attention=flash_attention, device=meta)
    logits = step.logits(4)
    assert (logits.device, logits.dtype, logits.shape) == (meta, torch.bfloat16, (4, config.vocab_size))
    step.draw(0, logits, lambda x, u: draw_in_blocks(x, u, 1.0), bans=True)
    step(2, lambda x, u: draw_in_blocks(x, u, 1.0), bans=False)


@pytest.mark.parametrize("vocabulary", [640, 97, 151_936])
def test_drawing_in_blocks_is_drawing(vocabulary):
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(64, vocabulary, generator=numbers) * 4
    noise = torch.rand(64, dtype=torch.float64, generator=numbers)
    got, want = draw_in_blocks(logits, noise, 0.7), sample_tokens(logits, noise, Sampling(1, temperature=0.7))
    same = got[0] == want[0]
    assert same.float().mean() >= 0.95
    assert torch.allclose(got[1][same], want[1][same], atol=1e-5)


def test_drawing_in_blocks_never_gives_what_is_banned():
    logits = torch.full((3, 64), float("-inf"))
    logits[:, [5, 20, 40]] = torch.tensor([0.0, 1.0, 2.0])
    for noise, token in ((0.0, 5), (1 - 2**-53, 40)):
        tokens, log_probs = draw_in_blocks(logits, torch.full((3,), noise, dtype=torch.float64), 1.0)
        assert tokens.tolist() == [token] * 3
        assert log_probs.isfinite().all()


def test_drawing_in_blocks_at_the_borders_of_blocks_never_gives_what_is_banned():
    torch.manual_seed(0)
    logits = torch.randn(1, 64 * 256)
    logits[:, ::256] = float("-inf")  # the first token of each block
    ends = logits.view(1, -1, 256).double().exp().sum(-1).cumsum(-1)
    borders = (ends / ends[:, -1:]).flatten()
    noise = torch.cat([borders * (1 + step * 2**-24) for step in range(-8, 9)]).clamp(max=1 - 2**-53)
    _, log_probs = draw_in_blocks(logits.expand(len(noise), -1), noise, 1.0)
    assert log_probs.isfinite().all()


def test_the_probe_finds_slots_that_are_off(model_folder, caplog, monkeypatch):
    rollout = engine(model_folder(), in_slots=True)
    assert probe(rollout._slots, rollout._prefilled) < 1e-5

    def made():
        with caplog.at_level("INFO", "rlcore.engines.hf.slot_rows"):
            return capturable(rollout.hf, rollout.dtype, rollout.end_ids, rollout.tokenizer, rollout._prefilled)

    assert made() == (None, "CUDA graphs failed with RuntimeError")
    assert "cannot decode in CUDA graphs: " in caplog.text  # there is no GPU here
    monkeypatch.setattr(SlotRows, "_captured", lambda rows, run: type("Graph", (), {"replay": staticmethod(run)}))
    slots, description = made()
    assert isinstance(slots, SlotRows)
    assert description == "in slots, replaying CUDA graphs"
    assert "decodes in slots, replaying CUDA graphs" in caplog.text
    monkeypatch.setattr(
        slot_rows, "masked_attention", lambda *_: lambda rotated, values, cache: -rotated[:, : -values.shape[1]]
    )
    slots, description = made()
    assert slots is None
    assert description.startswith("log-probs of CUDA graphs would be off by ")
    assert "its log-probs would be off by" in caplog.text


def test_without_triton_a_large_model_in_bf16_decodes_without_the_attention_kernel(model_folder, caplog, monkeypatch):
    rollout = engine(model_folder(), in_slots=True)
    monkeypatch.setattr(SlotRows, "_captured", lambda rows, run: type("Graph", (), {"replay": staticmethod(run)}))
    monkeypatch.setattr(slot_rows, "pays_to_compile", lambda *_: True)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level("INFO", "rlcore.engines.hf.slot_rows"):
        slots, description = capturable(
            rollout.hf, torch.bfloat16, rollout.end_ids, rollout.tokenizer, rollout._prefilled
        )
    assert description == "in slots, replaying CUDA graphs of compiled pieces"
    assert not slots.kernel
    assert "cannot decode in CUDA graphs of compiled pieces and an attention kernel: ModuleNotFoundError" in caplog.text


def test_graphs_hold_half_the_slots_and_so_on_and_three_quarters_while_a_row_costs_time(model_folder):
    rollout = engine(model_folder(), in_slots=True)
    slots = rollout._slots
    slots.open(requests(Sampling(max_tokens=5)), 512)
    assert {live: slots._graph_rows(live) for live in (512, 400, 384, 257, 200, 192, 100, 96, 70, 33, 1)} == {
        512: 512,
        400: 512,
        384: 384,
        257: 384,
        200: 256,
        192: 192,
        100: 128,
        96: 96,
        70: 96,
        33: 64,
        1: 8,
    }


def test_a_graph_holds_all_rows_and_is_captured_once(model_folder, monkeypatch):
    rollout, captured = engine(model_folder(), in_slots=True, batch_size=32), []
    rollout._slots.capture = True

    def capture(rows, run):
        captured.append(run.args[0])
        return type("Graph", (), {"replay": staticmethod(run)})

    monkeypatch.setattr(SlotRows, "_captured", capture)
    wanted = requests(Sampling(max_tokens=60), count=32)
    plain = sampled(engine(model_folder(), in_slots=False), wanted)
    for _ in range(2):
        assert_same_rows(sampled(rollout, wanted), plain)
    assert len(captured) > 1
    assert captured == [32 // 2**i for i in range(len(captured))]


def test_slots_are_as_many_as_there_is_memory_for(model_folder, monkeypatch):
    wanted = requests(Sampling(max_tokens=20))
    plain = sampled(engine(model_folder(), in_slots=False), wanted)
    rollout = engine(model_folder(), in_slots=True)
    monkeypatch.setattr(SlotRows, "_affordable", lambda *_: 9)
    assert_same_rows(sampled(rollout, wanted), plain)
    assert rollout._slots.slots == 9
    rollout = engine(model_folder(), in_slots=True)
    monkeypatch.setattr(SlotRows, "_affordable", lambda *_: 2)
    assert_same_rows(sampled(rollout, wanted), plain)
    assert rollout._slots.slots == 0, "too few: the plain step serves"
