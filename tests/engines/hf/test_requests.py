"""Requests: a row's tokens are its own, whenever it joins the others and however often it is interrupted."""

import random
from dataclasses import replace

import pytest
import torch

from rlcore.engine.rollout import Request, Sampling
from rlcore.engines.hf.fused_decode import FusedDecodeStep
from rlcore.errors import DataError

MORE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gpt2", "gemma2")]
KINDS = ["qwen2", "mistral-window", *MORE]
"""A model with a fused decode step and one without always; the others show the same."""
NEAR = 2e-5
"""How far apart, in nats, the log-probs of a row may be in other company.

Matrix products of another number of rows, and attention over another number of masked columns, add up the same fp32
numbers in another order: a few roundings of 6e-8 of logits up to about 20. The largest seen over all models here: 7e-6.
"""


def make_requests(**options) -> list[Request]:
    """Return 12 rows with prompts of 1 to 40 tokens, a third of them with the same one, and different limits."""
    numbers = random.Random(5)
    requests = []
    for row in range(12):
        prompt = tuple(range(5, 12)) if row % 3 == 0 else tuple(numbers.choices(range(5, 90), k=numbers.randint(1, 40)))
        limit = numbers.randint(4, 50)
        requests.append(Request(str(row), prompt, 7919 * row + 13, Sampling(max_tokens=limit, **options)))
    return requests


def run(rollout, plan) -> dict:
    """Add each request of `plan`, pairs of a step and a request, in its step; return all rows by id."""
    plan, done, step = list(plan), {}, 0
    while plan or rollout.in_flight:
        rollout.add([request for when, request in plan if when == step])
        plan = [(when, request) for when, request in plan if when > step]
        for row in rollout.step():
            assert row.id not in done
            done[row.id] = row
        step += 1
    return done


ORDERS = {
    "at once": (64, lambda rows: [(0, row) for row in rows]),
    "backwards, one every third step": (64, lambda rows: [(3 * i, row) for i, row in enumerate(rows[::-1])]),
    "into three slots": (3, lambda rows: [(0, row) for row in rows]),
    "shuffled, into five slots": (5, lambda rows: [(0, row) for row in random.Random(1).sample(rows, len(rows))]),
    "late, into two slots": (2, lambda rows: [(17 * i, row) for i, row in enumerate(rows)]),
}
"""Slots of the engine, and in which step each row is added."""


@pytest.fixture(scope="module")
def alone(make_rollout):
    """Every row of make_requests(**options), sampled alone in an engine."""
    kept: dict = {}

    def get(kind: str, **options) -> dict:
        key = (kind, *sorted(options.items()))
        if key not in kept:
            rollout = make_rollout(kind)
            kept[key] = {}
            for request in make_requests(**options):
                kept[key].update(run(rollout, [(0, request)]))
        return kept[key]

    return get


def check_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, row in want.items():
        assert got[name].tokens == row.tokens, name
        assert got[name].reason == row.reason
        torch.testing.assert_close(
            torch.tensor(got[name].log_probs), torch.tensor(row.log_probs), rtol=0, atol=NEAR, msg=name
        )


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_when_it_was_admitted_and_beside_whom(make_rollout, alone, kind, order):
    slots, plan = ORDERS[order]
    check_same(run(make_rollout(kind, slots), plan(make_requests())), alone(kind))


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("options", [{"min_tokens": 9}, {"top_p": 0.8, "top_k": 20}, {"stop": ("7", "a", "e")}])
def test_nor_does_a_row_with_limits_cuts_or_stops(make_rollout, alone, options, order):
    slots, plan = ORDERS[order]
    check_same(run(make_rollout("qwen2", slots), plan(make_requests(**options))), alone("qwen2", **options))


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("options", [{}, {"min_tokens": 9, "stop": ("7", "a", "e")}])
def test_a_row_that_goes_on_after_some_tokens_is_the_uninterrupted_one(make_rollout, alone, options, order):
    """Also beside rows that begin, and where a stop string begins before the interruption."""
    want, (slots, plan) = alone("qwen2", **options), ORDERS[order]
    requests = []
    for number, request in enumerate(make_requests(**options)):
        whole = want[request.id]
        done = min(number, len(whole.tokens) - 1)
        requests.append(
            replace(request, sampled=tuple(whole.tokens[:done]), sampled_log_probs=tuple(whole.log_probs[:done]))
        )
    check_same(run(make_rollout("qwen2", slots), plan(requests)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_same_shapes_log_probs_are_equal_to_the_bit(make_rollout, kind):
    """The same rows in another order: every product has as many rows as before, only others beside each other."""
    rollout = make_rollout(kind)
    want = run(rollout, [(0, row) for row in make_requests()])
    for seed in range(3):
        rows = random.Random(seed).sample(make_requests(), 12)
        assert run(rollout, [(0, row) for row in rows]) == want


def test_rows_that_are_sampled_differently_decode_together(make_rollout):
    kinds = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"min_tokens": 20}, {"stop": ("7",)}]
    samplings = [Sampling(max_tokens=30, **kind) for kind in kinds]
    requests = [replace(row, sampling=samplings[int(row.id) % 5]) for row in make_requests()]
    rollout = make_rollout()
    want: dict = {}
    for request in requests:
        want.update(run(rollout, [(0, request)]))
    check_same(run(rollout, [(number // 4, row) for number, row in enumerate(requests)]), want)
    assert want["0"].log_probs == [0.0] * len(want["0"].tokens)


def test_a_stop_string_across_an_interruption_ends_the_row(make_rollout):
    """A free row's text holds the two characters; the row is interrupted between them."""
    rollout = make_rollout()
    decode = rollout.tokenizer.decode
    for row in run(rollout, [(0, row) for row in make_requests()]).values():
        cuts = [at for at in range(1, len(row.tokens)) if decode(row.tokens[at - 1 : at + 1]).isprintable()]
        cuts = [at for at in cuts if len(decode(row.tokens[at - 1 : at + 1])) == 2]
        if cuts:
            break
    request = make_requests()[int(row.id)]
    stop = decode(row.tokens[cuts[0] - 1 : cuts[0] + 1])
    for at in (0, cuts[0]):
        sampled = {"sampled": tuple(row.tokens[:at]), "sampled_log_probs": tuple(row.log_probs[:at])}
        stopped = replace(request, sampling=Sampling(max_tokens=50, stop=(stop,)), **sampled)
        (out,) = run(rollout, [(0, stopped)]).values()
        assert out.reason == "stop"
        assert decode(out.tokens) == decode(row.tokens[: cuts[0] + 1])


def test_abort_frees_a_slot_and_gives_the_tokens_from_which_the_row_can_go_on(make_rollout):
    rollout = make_rollout(batch_size=2)
    sampling = Sampling(max_tokens=40, min_tokens=40)
    requests = [Request(name, (5 + row, 6), row, sampling) for row, name in enumerate("abc")]
    want = run(rollout, [(0, row) for row in requests])
    rollout.add(requests)
    for _ in range(7):
        assert rollout.step() == []
    assert [len(row.request.sampled) for row in rollout._rows.rows] == [0, 0]
    aborted, waiting = rollout.abort(["a", "c"])
    assert (aborted.id, aborted.reason, aborted.finished) == ("a", "abort", False)
    assert aborted.tokens == want["a"].tokens[:7]
    assert (waiting.id, list(waiting.tokens)) == ("c", [])
    assert list(rollout.in_flight) == ["b"]
    kept = {"sampled": tuple(aborted.tokens), "sampled_log_probs": tuple(aborted.log_probs)}
    rollout.add([replace(requests[0], **kept)])
    rollout.step()
    assert len(rollout._rows.rows) == 2, "the slot was free at once"
    check_same(run(rollout, []), {name: want[name] for name in "ab"})


def test_slots_are_filled_again_while_others_decode(make_rollout, monkeypatch):
    """Rows of 4 to 50 tokens through 4 slots take fewer steps than three batches of 4, each with its tail, would."""
    counts: list[int] = []
    step = FusedDecodeStep.step
    monkeypatch.setattr(
        FusedDecodeStep, "step", lambda own, new, *args: counts.append(len(new)) or step(own, new, *args)
    )
    rows = [replace(row, sampling=replace(row.sampling, min_tokens=50)) for row in make_requests()]
    run(make_rollout(batch_size=4), [(0, row) for row in rows])
    limits = [row.sampling.max_tokens for row in rows]
    assert max(counts) == 4
    assert len(counts) < 0.85 * sum(max(limits[start : start + 4]) for start in range(0, 12, 4))


def test_columns_of_rows_that_have_left_are_given_back(make_rollout):
    """A long row leaves, another joins: the cache is then as wide as the longest row that is there."""
    rollout = make_rollout(batch_size=2)
    long = Request("long", tuple(range(5, 65)), 1, Sampling(max_tokens=3, min_tokens=3))
    short = [Request(name, (7, 8), 2, Sampling(max_tokens=20, min_tokens=20)) for name in ("b", "c")]
    rollout.add([long, short[0]])
    for _ in range(3):
        rollout.step()
    assert rollout._rows.cache.get_seq_length() == 62
    rollout.add([short[1]])
    rollout.step()
    assert rollout._rows.cache.get_seq_length() == 5
    got = run(rollout, [])
    assert got["b"].tokens == got["c"].tokens, "the same prompt and noise"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "there"}, "its id is in flight already"),
        ({"prompt": ()}, "its prompt is empty"),
        ({"sampled": (5,)}, "it has 1 sampled tokens and 0 log-probs"),
        ({"sampled": (5,) * 4, "sampled_log_probs": (0.0,) * 4}, "it has 4 sampled tokens, and max_tokens=4"),
        ({"row_limit": 4}, "its row_limit is 4; its prompt and max_tokens are 5 tokens"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused_and_none_of_its_call_is_added(make_rollout, change, message):
    rollout = make_rollout()
    sampling = Sampling(max_tokens=4)
    rollout.add([Request("there", (5,), 0, sampling)])
    with pytest.raises(DataError, match=message):
        rollout.add([Request("first", (5,), 0, sampling), replace(Request("second", (5,), 0, sampling), **change)])
    assert list(rollout.in_flight) == ["there"]
    with pytest.raises(DataError, match="cannot abort 'x': no such request is in flight"):
        rollout.abort(["there", "x"])
    assert list(rollout.in_flight) == ["there"]


def test_weights_and_batches_wait_for_requests_in_flight(make_rollout, prompts):
    rollout = make_rollout()
    weights = {name: parameter.detach().clone() for name, parameter in rollout.hf.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    rollout.add([Request("a", (5,), 0, Sampling(max_tokens=9))])
    for take in (rollout.sync, rollout.adopt):
        with pytest.raises(DataError, match="weights cannot change while 1 requests are in flight"):
            take(iter(weights.items()), 1, shapes)
    with pytest.raises(DataError, match="generate needs an idle engine, but 1 requests are in flight"):
        rollout.generate(prompts(), Sampling(max_tokens=4))
    assert run(rollout, [])["a"].weights_version == 0
    rollout.sync(iter(weights.items()), 1, shapes)
    assert rollout.generate(prompts(), Sampling(max_tokens=4))["weights_version"].tolist() == [1] * 20


def test_an_update_that_broke_off_leaves_an_engine_that_refuses_requests(make_rollout):
    rollout = make_rollout()
    weights = {name: parameter.detach().clone() for name, parameter in rollout.hf.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    request = Request("a", (5,), 0, Sampling(max_tokens=9))
    for take in (rollout.sync, rollout.adopt):
        with pytest.raises(DataError, match="weights are missing"):
            take(iter(list(weights.items())[:-1]), 1, shapes)
        with pytest.raises(DataError, match="call sync before the first request"):
            rollout.add([request])
        take(iter(weights.items()), 1, shapes)
        assert run(rollout, [(0, request)])["a"].weights_version == 1


def test_an_error_during_generate_leaves_an_idle_engine(make_rollout, prompts, monkeypatch):
    rollout = make_rollout(batch_size=8)
    with monkeypatch.context() as patch:
        patch.setattr(FusedDecodeStep, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rollout.generate(prompts(), Sampling(max_tokens=4))
    assert not rollout.in_flight
    assert rollout._rows is None
    assert rollout.step() == []
    assert len(rollout.generate(prompts(), Sampling(max_tokens=4))) == 20


def conversation(rollout, *, keep: bool, turns: int = 3, rows: int = 6) -> list[tuple]:
    """Return tokens and log-probs of rows of several turns; some of a turn's rows come later than the others."""
    known = {str(row): tuple(range(5 + row, 9 + 2 * row)) for row in range(rows)}
    found = []
    for turn in range(turns):
        requests = [
            Request(
                name,
                tokens,
                int(name) + 100 * turn,
                Sampling(max_tokens=5 + int(name)),
                keep=keep,
                after=name if turn else None,
            )
            for name, tokens in known.items()
        ]
        done = run(rollout, [(2 * (int(request.id) % 3), request) for request in requests])
        for name, row in sorted(done.items()):
            found.append((name, turn, row.tokens, row.log_probs))
            # The next turn's prompt: everything so far, and an answer of another length for each row.
            # One answer is longer than some whole conversations, which are padding beside it.
            answer = (20,) * 40 if (name, turn) == ("5", 0) else range(20, 21 + (int(name) + turn) % 4)
            known[name] = (*known[name], *row.tokens, *answer)
    return found


@pytest.mark.parametrize("kind", ["qwen2", "mistral-window", "gemma2"])
@pytest.mark.parametrize("slots", [64, 2])
def test_a_row_that_continues_a_kept_one_is_that_of_its_whole_prompt(make_rollout, kind, slots):
    """Only the new tokens are computed; the keys and values of the others are those of the earlier turns."""
    rollout = make_rollout(kind, batch_size=slots)
    want, got = conversation(rollout, keep=False), conversation(rollout, keep=True)
    assert len(got) == 18
    for (*name, tokens, log_probs), (*other, fresh, expected) in zip(got, want, strict=True):
        assert name == other
        assert tokens == fresh, name
        torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(expected), atol=NEAR, rtol=0)
    rollout.forget([str(row) for row in range(6)])


def counting(forward, widths):
    """Return `forward`, which then notes the tokens of each row."""

    def counted(ids, *rest):
        widths.append(ids.shape[1])
        return forward(ids, *rest)

    return counted


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_a_continued_row_computes_its_new_tokens_only(make_rollout, monkeypatch, kind):
    rollout = make_rollout(kind)
    assert (rollout._fused is None) == (kind == "gemma2")
    widths = []
    for owner, name in [(rollout, "_forward"), *([(rollout._fused, "step")] if rollout._fused else [])]:
        counted = counting(getattr(owner, name), widths)
        monkeypatch.setattr(owner, name, counted)
    first = Request("a", tuple(range(5, 45)), 1, Sampling(max_tokens=2), keep=True)
    (row,) = run(rollout, [(0, first)]).values()
    prompt = (*first.prompt, *row.tokens, 9, 10, 11)
    run(rollout, [(0, Request("a", prompt, 2, Sampling(max_tokens=2), after="a"))])
    assert widths == [40, 1, 4, 1], "the newest sampled token was never fed, and three are new"


def test_kept_rows_hold_the_module_until_they_are_forgotten(make_rollout):
    """A shared module stays in the state for decoding between turns; new weights make kept rows worthless."""
    rollout = make_rollout()
    rollout.hf.train()
    request = Request("a", (5, 6, 7), 1, Sampling(max_tokens=3), keep=True)
    run(rollout, [(0, request)])
    assert not rollout.hf.training
    rollout.forget(["unknown", "a"])
    assert rollout.hf.training
    rollout.hf.eval()
    run(rollout, [(0, request)])
    weights = {name: each.detach().clone() for name, each in rollout.hf.named_parameters()}
    rollout.sync(iter(weights.items()), 1, {name: tuple(each.shape) for name, each in weights.items()})
    assert not rollout._kept
    (aborted,) = [rollout.add([request]), rollout.step(), rollout.abort(["a"])][2]
    assert aborted.reason == "abort"
    assert not rollout._kept
