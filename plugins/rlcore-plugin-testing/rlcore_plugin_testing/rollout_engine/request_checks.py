"""The checks on rows that join, leave and go on, and on updates of the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcore import DataError
from rlcore.engine import Finished, Request, Sampling, checksum
from rlcore.ops import noise_key
from rlcore_plugin_testing.report import CheckFailed, NotApplicable, expect_error
from rlcore_plugin_testing.rollout_engine.suite import SLOTS, Plan, RolloutEngineSuite, continued, held_bytes, shapes_of

ORDERS: dict[str, Callable[[list[Request]], Plan]] = {
    "added at once": lambda rows: [(0, row) for row in rows],
    "added at once, backwards": lambda rows: [(0, row) for row in rows[::-1]],
    "one added every third step": lambda rows: [(3 * number, row) for number, row in enumerate(rows)],
    "shuffled, added in pairs": lambda rows: [
        (5 * (number // 2), row) for number, row in enumerate(random.Random(1).sample(rows, len(rows)))
    ],
    "the first four late": lambda rows: [(0, row) for row in rows[4:]] + [(25, row) for row in rows[:4]],
}
"""In which steps rows are added."""
ADMITTED: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.8, "min_tokens": 5})
"""Samplings of the rows that are added in these orders."""
KEPT_BYTES = 16384
"""Bytes of tensors that an engine may hold more after its work than before."""


def admission_orders(suite: RolloutEngineSuite) -> str:
    """A row's tokens do not depend on when it was added and beside whom; log-probs only up to rounding."""
    joined = _joins(suite) if suite.spec.capabilities.continuous_batching else "rows wait for a batch to end"
    for options in ADMITTED:
        want = suite.alone(**options)
        for title, plan in ORDERS.items():
            suite.expect_same(suite.run(plan(suite.requests(**options))), want, title)
    return f"12 rows, {len(ORDERS)} orders, two samplings; {joined}"


def _joins(suite: RolloutEngineSuite) -> str:
    """Expect a short row to end while a long one decodes that was there before it."""
    engine = suite.engine
    prompt = suite.prompt(5, 1)
    engine.add([Request("long", prompt, 1, Sampling(max_tokens=200, min_tokens=200))])
    for _ in range(3):
        engine.step()
    engine.add([Request("short", prompt, 2, Sampling(max_tokens=4, min_tokens=4))])
    while "short" in engine.in_flight:
        engine.step()
    if "long" not in engine.in_flight:
        raise CheckFailed("a row that was added later waited for one that decoded already (continuous_batching)")
    engine.abort(["long"])
    return "a row joins others while they decode"


def so_far(suite: RolloutEngineSuite) -> str:
    """The tokens of a row in flight are those with which its answer begins, and grow."""
    engine, told = suite.engine, 0
    rows = suite.requests()
    rows[0] = replace(rows[0], sampled=(3, 4), sampled_log_probs=(-1.0, -2.0))
    engine.add(rows)
    known: dict[str, list[int]] = {}
    while engine.in_flight:
        ended = {row.id: list(row.tokens) for row in engine.step()}
        found = {name: list(tokens) for name, tokens in engine.so_far(engine.in_flight).items()}
        if unknown := found.keys() - set(engine.in_flight):
            raise CheckFailed(f"so_far gives rows that are not in flight: {', '.join(sorted(unknown))}")
        told += len(found)
        for name, tokens in {**found, **ended}.items():
            if tokens[: len(known.get(name, []))] != known.get(name, []):
                raise CheckFailed(f"row {name} had the tokens {known[name]} so far, and then {tokens}")
        known |= {**found, **ended}
    if not told:
        raise NotApplicable("the engine tells no tokens before a row ends, so streams have one part")
    if known[rows[0].id][:2] != [3, 4]:
        raise CheckFailed(f"so_far leaves out the tokens of Request.sampled: {known[rows[0].id][:2]}")
    return f"{told} looks at {len(rows)} rows"


def mixed_samplings(suite: RolloutEngineSuite) -> str:
    """Rows that are sampled in different ways decode together as they do alone."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"min_tokens": 20},
        {"top_p": 0.5},
    ]
    samplings = [Sampling(**{"max_tokens": 25, **kind}) for kind in kinds]
    rows = [replace(row, sampling=samplings[number % 5]) for number, row in enumerate(suite.requests())]
    want: dict[str, Finished] = {}
    for row in rows:
        want.update(suite.run([(0, row)]))
    suite.expect_same(
        suite.run([(number // 3, row) for number, row in enumerate(rows)]), want, "beside other samplings"
    )
    return f"{len(rows)} rows of {len(kinds)} samplings"


def continued_rows(suite: RolloutEngineSuite) -> str:
    """A row that goes on from k of its tokens gets the tokens of the uninterrupted row, for several k at a time."""
    samplings: tuple[dict[str, Any], ...] = ({}, {"top_k": 20, "min_tokens": 9})
    for options in samplings:
        want = suite.alone(**options)
        rows = [
            continued(row, want[row.id], min(2 * number, len(want[row.id].tokens) - 1))
            for number, row in enumerate(suite.requests(**options))
        ]
        suite.expect_same(suite.run([(number // 2, row) for number, row in enumerate(rows)]), want, "continued")
    return f"{2 * len(rows)} rows, continued after 0 to 22 tokens"


def kept_rows(suite: RolloutEngineSuite) -> str:
    """A turn that continues a kept row is that of its whole conversation, also after other rows, and other weights."""
    requests = [
        replace(row, sampling=replace(row.sampling, max_tokens=1 if number % 4 == 1 else 8), keep=True)
        for number, row in enumerate(suite.requests(6, most=60))
    ]
    rows = suite.run([(0, row) for row in requests])
    for turn, what in enumerate(("continued", "continued again", "continued with other weights", "forgotten"), 1):
        requests = [_next_turn(suite, row, rows[row.id], turn) for row in requests]
        fork = replace(requests[0], id=f"fork {turn}", key=turn, keep=False)
        if turn == 3:
            suite.sync()
        if turn == 4:
            suite.engine.forget([row.id for row in requests])
        whole = {row.id: replace(row, id=f"whole {row.id}", keep=False, after=None) for row in (*requests, fork)}
        alone = suite.run([(0, row) for row in whole.values()])
        suite.expect_likely(list(whole.values()), alone)
        rows = suite.run([(number % 3, row) for number, row in enumerate((*requests, fork))])
        suite.expect_same(rows, {name: alone[row.id] for name, row in whole.items()}, what)
    suite.engine.forget([row.id for row in requests])
    return (
        f"{len(requests)} conversations of 5 turns, and a second row that continues one of them, are those sent whole"
    )


def _next_turn(suite: RolloutEngineSuite, request: Request, row: Finished, turn: int) -> Request:
    """Return the request that continues a row after an answer to it, of another length for each row."""
    answer = suite.prompt(1 + (int(request.id) + turn) % 4, turn)
    key = noise_key(request.key, turn)
    return replace(request, prompt=(*request.prompt, *row.tokens, *answer), key=key, after=request.id)


def abort(suite: RolloutEngineSuite) -> str:
    """An aborted row comes back as far as it is, its slot is free, the others go on, and it can go on later."""
    engine = suite.engine
    requests = suite.requests(min_tokens=100, max_tokens=100)  # an engine may decode several tokens a step
    want: dict[str, Finished] = {}
    for row in (requests[0], requests[1], requests[11]):
        want.update(suite.run([(0, row)]))
    engine.add(requests)
    for _ in range(6):
        engine.step()
    with expect_error(DataError, "abort() of an id that is not in flight"):
        engine.abort(["0", "none"])
    gone = {row.id: row for row in engine.abort(["0", "1", "11"])}
    for name in want:
        ended = gone.get(name)
        if ended is None or ended.reason != "abort" or ended.finished or name in engine.in_flight:
            raise CheckFailed(f"abort() did not return row {name} with the reason 'abort', or keeps it in flight")
        count = len(ended.tokens)
        if list(ended.tokens) != list(want[name].tokens)[:count] or len(ended.log_probs) != count:
            raise CheckFailed(f"the aborted row {name} does not have the first tokens and log-probs of the whole one")
    if not gone["0"].tokens:
        raise CheckFailed("after six steps the first row of the queue has no tokens")
    rows = {row.id: row for row in requests}
    again = [continued(rows[name], row, len(row.tokens)) for name, row in gone.items()]
    suite.expect_same(_finish(suite, again), want, "after an abort")
    return f"3 of {len(requests)} rows aborted, one before it had a slot, and continued"


def refusals(suite: RolloutEngineSuite) -> str:
    """Bad requests are refused with a DataError, and none of their call is added; weights wait for requests."""
    engine, good = suite.engine, Request("good", suite.prompt(4, 1), 1, Sampling(max_tokens=4))
    bad = {
        "an empty prompt": replace(good, id="bad", prompt=()),
        "the id of a request in flight": good,
        "sampled tokens without log-probs": replace(good, id="bad", sampled=(5,)),
        "all of its tokens": replace(good, id="bad", sampled=(5,) * 4, sampled_log_probs=(0.0,) * 4),
    }
    engine.add([good])
    for title, request in bad.items():
        with expect_error(DataError, f"a request with {title}"):
            engine.add([replace(good, id="other"), request])
        if list(engine.in_flight) != ["good"]:
            raise CheckFailed(f"of a call with {title} some requests were added: {', '.join(engine.in_flight)}")
    weights = suite.reference.draw_weights(suite.newest)
    with expect_error(DataError, "sync() with requests in flight"):
        engine.sync(iter(weights.items()), suite.newest, shapes_of(weights))
    with expect_error(DataError, "generate() with requests in flight"):
        engine.generate(suite.batch(), Sampling(max_tokens=2))
    _finish(suite, [])
    return f"{len(bad)} kinds of bad request; weights and batches wait for requests in flight"


def versions(suite: RolloutEngineSuite) -> str:
    """After each update samples come from the new weights alone, and name their version; by sync and by adopt."""
    sampling = Sampling(max_tokens=12, temperature=0.0)
    prompts = [suite.prompt(length, length) for length in (5, 140) if length + 12 <= suite.reference.longest]
    requests = [Request(str(number), prompt, 1, sampling) for number, prompt in enumerate(prompts)]
    seen: list[Any] = []
    for adopt in (False, True, False):
        rows = suite.run([(0, row) for row in requests])
        seen.append([list(row.tokens) for row in rows.values()])
        version = suite.sync(adopt=adopt)
        if suite.engine.version != version:
            raise CheckFailed(f"its version is {suite.engine.version} after weights of version {version}")
        rows = suite.run([(0, row) for row in requests])
        suite.expect_likely(requests, rows)
        if {row.weights_version for row in rows.values()} != {version}:
            raise CheckFailed(f"rows that version {version} sampled name another one")
        if [list(row.tokens) for row in rows.values()] in seen:
            raise CheckFailed("new weights give the old tokens")
    return f"{len(seen)} updates, by sync and by adopt"


def fingerprint(suite: RolloutEngineSuite) -> str:
    """The fingerprint has the checksums of the newest weights, by sync and by adopt; an engine may have none."""
    for adopt in (False, True, False):
        if suite.engine.fingerprint() is None:
            raise NotApplicable("it has no fingerprint, so runs compare its log-probs with the train engine's")
        suite.sync(adopt=adopt)
        found = suite.engine.fingerprint() or {}
        wanted = {name: checksum(parameter) for name, parameter in suite.reference.hf.named_parameters()}
        if wrong := [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]:
            raise CheckFailed(f"its fingerprint has {len(wrong)} wrong checksums, such as that of {wrong[0]}")
    return f"{len(wanted)} checksums after each of 3 updates"


def dead_update(suite: RolloutEngineSuite) -> str:
    """An update with wrong names or shapes is refused before it begins; one that breaks off leaves no mixed weights."""
    requests = suite.requests(4, temperature=0.0)
    before, version = suite.run([(0, row) for row in requests]), suite.engine.version
    weights = suite.reference.draw_weights(suite.newest + 1)
    first, *rest = weights
    wrong = {
        "a weight missing": {name: weights[name] for name in rest},
        "an unknown weight": {**weights, "unknown.weight": torch.zeros(1)},
        "a misshapen weight": {**weights, first: torch.zeros(1)},
    }
    for title, update in wrong.items():
        taken: list[str] = []
        with expect_error(DataError, f"an update with {title}"):
            suite.engine.sync(_noting(update, taken), version + 1, shapes_of(update))
        if taken or suite.engine.version != version:
            raise CheckFailed(f"with {title} it took {len(taken)} weights before it refused")
        suite.expect_same(suite.run([(0, row) for row in requests]), before, f"after an update with {title}")
    with expect_error(DataError, "an update that breaks off half-way"):
        suite.engine.sync(iter(list(weights.items())[: len(weights) // 2]), version + 1, shapes_of(weights))
    try:
        after = suite.run([(0, row) for row in requests])
    except DataError:
        answer = "is refused"
    else:
        suite.expect_same(after, before, "after an update that broke off, without refusing requests")
        answer = "leaves the old weights"
    suite.sync()
    return f"{len(wrong)} kinds of wrong update; one that breaks off {answer}"


def memory(suite: RolloutEngineSuite) -> str:
    """Rows that ended, were forgotten or aborted leave no memory, and a closed engine leaves nothing. It runs last."""
    engine = suite.engine
    requests = suite.requests(2 * SLOTS, most=200, min_tokens=100, max_tokens=100)
    held = []
    for _ in range(3):
        engine.add(requests)
        for _ in range(40):
            engine.step()
        engine.abort(list(engine.in_flight))
        held.append(held_bytes())
    if held[-1] - held[0] > KEPT_BYTES:
        raise CheckFailed(f"each load that was aborted leaves {(held[-1] - held[0]) // 2} bytes")
    kept_requests = [replace(row, keep=True) for row in suite.requests()]
    suite.run([(0, row) for row in kept_requests])
    engine.forget([row.id for row in kept_requests])
    if (kept := held_bytes() - held[0]) > KEPT_BYTES:
        raise CheckFailed(f"rows that ended, and were forgotten, leave {kept} bytes")
    weights = sum(parameter.nbytes for parameter in suite.reference.hf.parameters())
    del engine
    alive = suite.close()
    kept = held_bytes() - suite.bytes_before
    if alive is not None and alive() is not None:
        raise CheckFailed(f"closed, the engine is still referred to, with {kept} bytes of tensors")
    if kept > weights // 10:
        raise CheckFailed(f"closed, the engine leaves {kept} bytes of tensors")
    return f"{3 * len(requests)} rows aborted; closed, it leaves {max(0, kept)} bytes"


def _finish(suite: RolloutEngineSuite, requests: list[Request]) -> Mapping[str, Finished]:
    """Add requests beside those in flight and return all rows."""
    engine, done = suite.created, dict[str, Finished]()
    engine.add(requests)
    while engine.in_flight:
        done.update((row.id, row) for row in engine.step())
    return done


def _noting(weights: Mapping[str, Tensor], taken: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        taken.append(name)
        yield name, tensor
