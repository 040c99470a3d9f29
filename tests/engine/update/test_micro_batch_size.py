"""The measured micro-batch: the arithmetic by hand, the memory of real passes, and that no trace is left."""

import importlib.util
from pathlib import Path

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.engine.generators import random_state
from rlcore.engine.update import micro_batch_size
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.micro_batch_size import (
    MemoryLine,
    choose,
    enough_tokens,
    measure,
    micro_batch_limit,
    place_of,
    synthetic_rows,
)

GB, MB = 10**9, 10**6


@pytest.fixture(scope="module")
def live_bytes():
    spec = importlib.util.spec_from_file_location("live_bytes", Path(__file__).parents[1] / "live_bytes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiveBytes


def update(engine, batch):
    return engine.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig(kl_coef=0.1))], epochs=1, step=0)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.export(torch.float32)}


# The arithmetic


def test_the_line_through_two_points():
    # 2 GB of gradients, and 1 MB a token.
    line = MemoryLine.through((2048, 4048 * MB), (4096, 6096 * MB))
    assert line == MemoryLine(fixed=2000 * MB, per_token=1 * MB)
    assert line.bytes(8192) == 10_192 * MB


def test_memory_that_does_not_grow_is_all_fixed():
    assert MemoryLine.through((2048, 7 * MB), (4096, 6 * MB)) == MemoryLine(7 * MB, 0.0)


@pytest.mark.parametrize(
    ("free", "tokens"),
    [
        (70 * GB, 8192),  # not more, though 64,000 tokens would fit
        (10_192 * MB, 8192),
        (10_191 * MB, 4096),
        (6 * GB, 2048),  # 4,000 tokens would fit
        (2_512 * MB, 512),
        (2 * GB, 256),  # does not fit either, and is the smallest
        (-1, 256),
    ],
)
def test_the_largest_power_of_two_that_fits(free, tokens):
    assert MemoryLine(2 * GB, MB).fitting(free) == tokens


def test_all_ranks_take_the_smallest_number():
    size = choose(MemoryLine(2 * GB, MB), 11 * GB, 512, "one card", lambda own: [own, 2048, 4096])
    assert (size.tokens, size.place) == (2048, "one card")
    assert size.reason == "measured: 1.00 MB a token and 2.0 GB, of 11.0 GB free"


@pytest.mark.parametrize(("free", "longest"), [(6 * GB, 5000), (2 * GB, 100)])
def test_a_row_that_may_not_fit_is_said(free, longest):
    size = choose(MemoryLine(2 * GB, MB), free, longest, "one card", lambda own: [own])
    tokens = max(longest, 256)
    assert size.reason.endswith(f"; a micro-batch of {tokens} tokens, as a row may have, would not fit")


@pytest.mark.parametrize(
    ("given", "gpu", "limit"), [("auto", False, 16384), ("auto", True, 8192), (0, True, 0), (300, False, 300)]
)
def test_the_number_before_a_measurement(given, gpu, limit):
    assert micro_batch_limit(given, gpu=gpu) == limit


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        (100_000_000, 32768),
        (494_000_000, 32768),  # 16,384 times 494 million are 8.1e12
        (1_000_000_000, 16384),
        (1_540_000_000, 8192),  # 1.26e13
        (70_000_000_000, 8192),
    ],
)
def test_a_small_model_gets_larger_micro_batches(parameters, tokens):
    assert enough_tokens(parameters) == tokens
    assert MemoryLine(2 * GB, MB).fitting(70 * GB, tokens) == tokens
    assert choose(MemoryLine(2 * GB, MB), 70 * GB, 512, "one card", lambda own: [own], tokens).tokens == tokens


# The measurement


@pytest.mark.parametrize("trains", [True, False])
def test_a_line_through_two_small_micro_batches_tells_the_memory_of_a_larger_one(make_engine, live_bytes, trains):
    engine = make_engine(trains=trains)
    with live_bytes() as live:
        line = measure(engine, live.peak, 1024)
        assert live.now == 0
        micro_batch_size._run(engine, 2048)  # makes the gradients
        larger = live.peak(lambda: micro_batch_size._run(engine, 2048))
    assert larger == pytest.approx(line.bytes(2048), rel=0.01)
    gradients = 4 * sum(tensor.numel() for tensor in weights(engine).values())
    assert (line.fixed > gradients) is trains
    assert line.per_token > 1000


def test_activation_checkpointing_takes_less(model_folder, engine_models, live_bytes):
    lines = []
    for checkpointing in (False, True):
        engine = engine_models.torch_engine(model_folder(), activation_checkpointing=checkpointing)
        with live_bytes() as live:
            lines.append(measure(engine, live.peak, 1024))
    assert lines[1].per_token < 0.8 * lines[0].per_token


def test_no_trace_is_left(make_engine, random_batch):
    measured, other = make_engine(lr=1e-2), make_engine(lr=1e-2)
    before, state = weights(measured), random_state()
    measure(measured, lambda run: [run(), 0][1], 512)
    assert random_state() == state
    assert measured.version == 0
    assert not measured.optimizer.state
    module = getattr(measured.model, "hf", measured.model)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(measured).items())
    assert update(measured, random_batch()) == update(other, random_batch())
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(measured).items())


def test_random_numbers_that_the_engine_draws_are_put_back(make_engine, monkeypatch):
    engine = make_engine()
    forward = engine.forward_backward
    monkeypatch.setattr(engine, "forward_backward", lambda *args, **words: [torch.rand(5), forward(*args, **words)])
    state = random_state()
    measure(engine, lambda run: [run(), 0][1], 512)
    assert random_state() == state


def test_both_sizes_run_before_they_are_measured(make_engine, monkeypatch):
    engine, ran, measured = make_engine(), [], []
    monkeypatch.setattr(micro_batch_size, "_run", lambda engine, tokens: ran.append(tokens))

    def peak(run):
        run()
        measured.append(list(ran))
        return 0

    measure(engine, peak)
    assert measured == [[], [2048] * 2, [2048, 2048, 4096, 4096]]


@pytest.mark.parametrize(("most_that_fits", "sizes"), [(4096, [2048, 4096]), (2048, [512, 1024]), (1024, [512, 1024])])
def test_a_measurement_that_does_not_fit_is_made_with_fewer_tokens(make_engine, monkeypatch, most_that_fits, sizes):
    def run(engine, tokens):
        if tokens > most_that_fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        bytes_of[tokens] = 1000 * tokens

    bytes_of = {}
    monkeypatch.setattr(micro_batch_size, "_run", run)
    line = measure(make_engine(), lambda run: [bytes_of.clear(), run(), max(bytes_of.values(), default=0)][2])
    assert line == MemoryLine(0, 1000)
    assert sizes[-1] == max(bytes_of)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [2048, 512]), (2, [2048])])
def test_memory_that_never_suffices_is_an_error_and_with_other_ranks_at_once(make_engine, monkeypatch, ranks, sizes):
    def run(engine, tokens):
        tried.append(tokens)
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine, tried = make_engine(), []
    monkeypatch.setattr(micro_batch_size, "_run", run)
    object.__setattr__(engine.ranks, "world_size", ranks)
    with pytest.raises(torch.OutOfMemoryError):
        measure(engine, lambda run: [run(), 0][1])
    assert tried == sizes


def test_made_up_rows_have_the_tokens_asked_for_and_no_prompt_in_common():
    rows = synthetic_rows(2048, vocab=97)
    assert int(rows["prompts"].lengths.sum() + rows["responses"].lengths.sum()) == 2048
    assert rows["prompts"].lengths.tolist() == [1] * 16
    assert len(set(rows["prompts"].values.tolist())) == 16
    assert int(rows["responses"].values.max()) < 97


def test_the_place_names_card_and_layout(make_engine):
    assert place_of(make_engine(), "NVIDIA H100") == "NVIDIA H100, pp=1 tp=1 dp=1 shard=1"
