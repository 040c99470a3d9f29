"""Decoding in slots: the same rows as the plain step gives, and a step that a GPU can replay."""

import random
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Request, Sampling
from rlcore.engine.sampling import sample_tokens
from rlcore.engines.hf import slot_rows
from rlcore.engines.hf.cache import BufferedCache
from rlcore.engines.hf.fused_decode import FusedDecodeStep, rotary_tables
from rlcore.engines.hf.kept_rows import KeptRows, SlotStates
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
        assert got[name].log_probs == pytest.approx(row.log_probs, abs=5e-5)


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
    # In fp64: over so many tokens torch's fp32 log_softmax is off by more than 1e-5 on some processors.
    exact = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, got[0][:, None]).squeeze(-1)
    assert torch.allclose(got[1].double(), exact, atol=1e-5)


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


def conversations(rollout, *, keep, turns=3, samples=2, prompts=4, lengths=(1, 9, 60)):
    """Return all rows of conversations of several turns, by id and turn.

    Some turns are one token long and end at once; the answers to a turn have another length for each row.
    """
    known = {each.id: each for each in requests(Sampling(max_tokens=4), samples * prompts, prompts)}
    tokens = {name: each.prompt for name, each in known.items()}
    rows = {}
    for turn in range(turns):
        wanted = []
        for at, (name, request) in enumerate(known.items()):
            sampling = Sampling(max_tokens=lengths[(at + turn) % len(lengths)])
            after = name if keep and turn else None
            wanted.append(Request(name, tokens[name], request.key + turn, sampling, keep=keep, after=after))
        for name, row in sampled(rollout, wanted).items():
            rows[f"{name}, turn {turn}"] = row
            tokens[name] = (*tokens[name], *row.tokens, *range(20, 21 + (int(name) + turn) % 4))
    return rows


def count_prefilled(rollout):
    """Return a list to which each forward of the module adds its numbers of rows and of tokens a row."""
    shapes = []
    rollout.hf.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("batch_size", [64, 3])
def test_a_turn_that_continues_a_row_is_that_of_its_whole_conversation(model_folder, kind, batch_size):
    """In slots, from kept rows, against the other decoder, which gets each turn's tokens whole."""
    want = conversations(engine(model_folder(kind), in_slots=False), keep=False)
    assert {len(row.tokens) for row in want.values()} >= {1, 9, 60}
    assert any(row.reason == "end" for row in want.values())
    rollout = engine(model_folder(kind), in_slots=True, batch_size=batch_size)
    got = conversations(rollout, keep=True)
    assert_same_rows(got, want)
    assert len(rollout._kept) == 8, "the rows of the last turn, which nobody continues"
    rollout.forget([str(row) for row in range(8)])
    assert (len(rollout._kept), rollout._kept.nbytes, rollout._mode) == (0, 0, None)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 7, "min_tokens": 3}, {"stop": tuple("0123456789")}, {"dtype": "bf16"}]
)
def test_turns_are_continued_whatever_ended_the_one_before(model_folder, options):
    """Also a row that went on, past its stop string, until the host looked; and keys and values in bf16."""
    dtype = options.pop("dtype", "fp32")
    sampling = Sampling(max_tokens=24, **options)
    rows = []
    for keep in (False, True):
        rollout = HFRollout(ModelConfig(path=str(model_folder()), dtype=dtype), batch_size=9, device=CPU, shared=None)
        rollout.version = 0
        rollout._slots = SlotRows(
            rollout.hf, rollout.dtype, rollout.end_ids, rollout.tokenizer, capture=False, compiled=False
        )
        first = [replace(each, keep=keep) for each in requests(sampling)]
        done = sampled(rollout, first)
        next_turn = [
            replace(each, prompt=(*each.prompt, *done[each.id].tokens, 11, 12), key=each.key + 1, after=each.id)
            for each in first
        ]
        rows.append((done, sampled(rollout, next_turn)))
    (first, whole), (kept, continued) = rows
    assert_same_rows(kept, first)
    if "stop" in options:
        assert any(row.reason == "stop" for row in first.values())
    if dtype == "fp32":
        assert_same_rows(continued, whole)
        return
    for request in next_turn:  # rounding to bf16 turns close draws, so each row has its own forward
        row = continued[request.id]
        tokens = torch.tensor([[*request.prompt, *row.tokens]])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = rollout.hf(input_ids=tokens).logits[0, len(request.prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(row.tokens)[:, None]).squeeze(-1)
        assert row.log_probs == pytest.approx(expected.tolist(), abs=5e-2)


def test_a_continued_turn_computes_its_new_tokens_only(model_folder):
    rollout = engine(model_folder(), in_slots=True)
    prompt, shapes = tuple(range(5, 45)), count_prefilled(rollout)
    first = [Request(name, prompt, key, Sampling(max_tokens=8), keep=True) for key, name in enumerate("abc")]
    done = sampled(rollout, first)
    assert shapes == [(1, 40)], "three samples of one prompt"
    turn = [Request(each.id, (*prompt, *done[each.id].tokens, 9, 10, 11), 7, Sampling(max_tokens=3)) for each in first]
    sampled(rollout, [replace(each, after=each.id) for each in turn])
    assert shapes[1:] == [(3, 4)], "the newest sampled token was never fed, and three are new"
    assert not rollout._kept
    sampled(rollout, turn)
    assert len(shapes) == 3
    assert shapes[2] == (3, max(len(each.prompt) for each in turn)), "nothing is kept: the whole conversation"


def test_keys_and_values_come_back_to_the_bit(model_folder):
    rollout = engine(model_folder(), in_slots=True)
    first = requests(Sampling(max_tokens=20, min_tokens=20), count=6, prompts=3)
    done = sampled(rollout, [replace(each, keep=True) for each in first])
    kept = {name: row.states.clone() for name, row in rollout._kept.items()}
    assert {name: each.shape[1] for name, each in kept.items()} == {each.id: len(each.prompt) + 19 for each in first}
    turn = [replace(each, prompt=(*each.prompt, *done[each.id].tokens, 9), after=each.id) for each in first]
    rollout.add(turn)
    rollout.step()
    slots = rollout._slots._step.slots
    for row, request in enumerate(rollout._slots.requests):
        states = kept[request.id]
        assert torch.equal(slots.cache[:, row, : states.shape[1]], states)
    rollout.abort(list(rollout.in_flight))


def test_requests_that_continue_one_row_share_it_until_the_last_has_a_slot(model_folder):
    """Several samples of the next turn, of which some wait for a slot."""
    rollout = engine(model_folder(), in_slots=True, batch_size=3)
    shapes = count_prefilled(rollout)
    first = Request("a", tuple(range(5, 30)), 1, Sampling(max_tokens=8, min_tokens=8), keep=True)
    row = sampled(rollout, [first])["a"]
    prompt = (*first.prompt, *row.tokens, 9)
    turn = [Request(str(key), prompt, key, Sampling(max_tokens=5), after="a") for key in range(7)]
    got = sampled(rollout, turn)
    assert {width for _, width in shapes[1:]} == {2}, "the newest token of the first turn, and the new one"
    assert not rollout._kept
    assert_same_rows(got, sampled(engine(model_folder(), in_slots=False), turn))


def test_beyond_the_bound_rows_are_computed_again(model_folder, monkeypatch):
    want = conversations(engine(model_folder(), in_slots=False), keep=False)
    held, computed = [], []
    for tokens in (10_000, 150, 0):
        rollout = engine(model_folder(), in_slots=True)
        heads = rollout.hf.config
        one = (
            4
            * 2
            * heads.num_hidden_layers
            * heads.num_key_value_heads
            * (heads.hidden_size // heads.num_attention_heads)
        )
        monkeypatch.setattr(KeptRows, "_measured", lambda _, most=tokens * one: most)
        shapes, step, most = count_prefilled(rollout), rollout.step, []

        def watched(rollout=rollout, step=step, most=most):
            rows = step()
            assert rollout._kept.nbytes == sum(each.nbytes for each in rollout._kept.values())
            most.append(rollout._kept.nbytes)
            return rows

        monkeypatch.setattr(rollout, "step", watched)
        assert_same_rows(conversations(rollout, keep=True), want)
        held.append(max(most) / one)
        computed.append(sum(rows * width for rows, width in shapes))
    assert held[0] > 150 >= held[1] > 75 > held[2] == 0
    assert computed[0] < computed[1] < computed[2]


def test_the_oldest_kept_rows_are_dropped_first():
    def row(tokens):
        return SlotStates(torch.zeros(2, tokens, 2, 1, 4))  # 64 bytes a token

    store = KeptRows(CPU)
    store._measured = lambda: 640
    store.keep([("a", row(4)), ("b", row(4))], 0)
    store.keep([("a", row(1))], 0)  # its next turn: now "b" is the oldest
    store.keep([("c", row(6))], 0)
    assert (list(store), store.nbytes) == (["a", "c"], 7 * 64)
    store.keep([("d", row(11))], 0)
    assert (list(store), store.nbytes) == ([], 0), "a row larger than the bound"


def test_the_bound_is_a_share_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (380, 10_000))
    store = KeptRows(torch.device("cuda"))
    assert store._measured() == 200, "half of what is free, with what torch has cached"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000, 10_000))
    assert store._measured() == 1_000, "a tenth of the GPU"


@pytest.mark.parametrize("switch", ["sync", "version", "decoder"])
def test_other_weights_and_the_other_decoder_continue_nothing_that_was_kept(model_folder, switch):
    rollout = engine(model_folder(), in_slots=True)
    first = requests(Sampling(max_tokens=12))
    done = sampled(rollout, [replace(each, keep=True) for each in first])
    assert len(rollout._kept) == len(first)
    turn = [replace(each, prompt=(*each.prompt, *done[each.id].tokens, 9), after=each.id) for each in first]
    torch.manual_seed(0)
    new = {name: each.detach() + torch.randn_like(each) * 0.05 for name, each in rollout.hf.named_parameters()}
    if switch == "sync":
        rollout.sync(iter(new.items()), 1, rollout.shapes)
        assert not rollout._kept
    elif switch == "version":  # as with a shared module, whose weights change without a call
        with torch.no_grad():
            for name, each in rollout.hf.named_parameters():
                each.copy_(new[name])
        rollout.version = 1
    else:  # one more row is kept by the other decoder, and continued beside the others
        rollout._slots.open = lambda *_: False
        new_row = replace(first[0], id="new", key=5, keep=True)
        done |= sampled(rollout, [new_row])
        turn.append(replace(new_row, prompt=(*new_row.prompt, *done["new"].tokens, 9), after="new", keep=False))
        assert list(rollout._kept) == ["new"]
    got = sampled(rollout, turn)
    fresh = engine(model_folder(), in_slots=False)
    fresh.hf.load_state_dict(rollout.hf.state_dict())
    assert_same_rows(got, sampled(fresh, turn))


def test_room_for_later_turns_is_made_once(model_folder, monkeypatch):
    """With `row_limit`; without it the slots open anew for a turn that is longer than all rows before it."""
    opened, new_step = [], SlotRows._new_step
    monkeypatch.setattr(SlotRows, "_new_step", lambda rows, *sizes: opened.append(sizes) or new_step(rows, *sizes))
    for limit, sizes in ((400, [(64, 512, 128)]), (None, [(64, 128, 128), (64, 256, 128), (64, 384, 128)])):
        rollout, known = engine(model_folder(), in_slots=True), tuple(range(5, 25))
        opened.clear()
        for turn in range(3):
            request = Request("a", known, turn, Sampling(max_tokens=20), keep=True, row_limit=limit)
            row = sampled(rollout, [replace(request, after="a" if turn else None)])["a"]
            known = (*known, *row.tokens, *range(5, 90), *range(5, 40))
        assert opened == sizes
    sampled(rollout, [Request("a", (5,), 0, Sampling(max_tokens=3), row_limit=600)])
    assert opened[-1] == (64, 640, 128), "a larger limit makes more room at once"


def test_room_for_later_turns_costs_no_slots(model_folder, monkeypatch):
    """Where memory is short: as many slots as the rows' own tokens leave, as wide as these may be."""
    opened, new_step, memory = [], SlotRows._new_step, 40 * 256
    monkeypatch.setattr(SlotRows, "_new_step", lambda rows, *sizes: opened.append(sizes) or new_step(rows, *sizes))
    monkeypatch.setattr(SlotRows, "_affordable", lambda rows, width, room: memory // width)
    wanted = [replace(each, row_limit=1000) for each in requests(Sampling(max_tokens=20), count=70)]
    plain = sampled(engine(model_folder(), in_slots=False), wanted)
    rollout = engine(model_folder(), in_slots=True, batch_size=64)
    assert_same_rows(sampled(rollout, wanted), plain)
    assert_same_rows(sampled(rollout, wanted), plain)
    assert opened == [(64, 128, 128)], "its later turns would fit into 10 slots of 1,024 tokens; tried once"
    rollout = engine(model_folder(), in_slots=True, batch_size=16)
    assert_same_rows(sampled(rollout, wanted), plain)
    assert opened[1:] == [(16, 640, 128)], "640 tokens are the most that 16 slots can have"
    longer = [replace(each, prompt=each.prompt + tuple(range(5, 90)) * 8) for each in wanted[:20]]
    sampled(rollout, longer)
    assert opened[2:] == [(13, 768, 128)], "rows of their own length open wider ones, and fewer"


def test_the_probe_leaves_no_slots_behind(model_folder):
    """They are fewer than a batch gets."""
    rollout = engine(model_folder(), in_slots=True, batch_size=20)
    probe(rollout._slots, rollout._prefilled)
    assert rollout._slots.slots == 0
    sampled(rollout, requests(Sampling(max_tokens=3)))
    assert rollout._slots.slots == 20
