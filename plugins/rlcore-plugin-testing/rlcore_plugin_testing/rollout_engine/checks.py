"""The checks on a rollout engine, and the list of all checks.

A check takes a RolloutEngineSuite and returns what it looked at, in a few words. It raises CheckFailed with what is
wrong, or NotApplicable with the reason, which follows from the spec's capabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rlcore import DataProto
from rlcore.config import from_yaml, to_yaml
from rlcore.engine import Finished, Request, RolloutEngine, Sampling, random_state, set_random_state
from rlcore_plugin_testing.report import CheckFailed
from rlcore_plugin_testing.rollout_engine import capability_checks, request_checks
from rlcore_plugin_testing.rollout_engine.suite import RolloutEngineSuite, continued

DISTRIBUTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"top_p": 0.6},
    {"top_k": 20, "top_p": 0.8, "min_tokens": 6},
)
"""Samplings whose log-probs are compared with the plain model's."""
LENGTHS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)
"""Lengths of prompts: around the sizes of blocks, tiles and buckets."""
DRAWS, LIKELIEST, CHI_SQUARED = 1000, 10, 29.6
"""First tokens drawn, and the chi-squared of the 10 likeliest and the rest that chance exceeds once in a thousand."""


def config(suite: RolloutEngineSuite) -> str:
    """The spec and its default config are valid, and an engine starts and refuses requests until it has weights."""
    if suite.spec.check is not None:
        suite.spec.check(suite.config)
    if from_yaml(to_yaml(suite.config), suite.manager) != suite.config:
        raise CheckFailed("the config that is saved with a run is not the same when it is read back")
    engine = suite.engine
    if not isinstance(engine, RolloutEngine):
        raise CheckFailed(f"create() returned a {type(engine).__name__}, which is no rlcore.engine.RolloutEngine")
    if suite.had_weights:
        raise CheckFailed("it took a request before its first weights; `add` raises DataError until `sync`")
    if engine.version != suite.newest:
        raise CheckFailed(f"after sync() with version {suite.newest} its version is {engine.version}")
    if finished := engine.step():
        raise CheckFailed(f"without requests step() returned {len(finished)} rows; it returns an empty list")
    own = suite.config.sections.get(f"rollout.{suite.name}")
    return f"{0 if own is None else len(dataclasses.fields(own))} settings; starts without weights"


def columns(suite: RolloutEngineSuite) -> str:
    """`generate` gives its columns, row by row in the batch's order, and none for no rows."""
    batch, sampling = suite.batch(4, 4), Sampling(max_tokens=30)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    out, mixed = suite.engine.generate(batch, sampling), suite.engine.generate(batch[order], sampling)
    texts = [suite.reference.tokenizer.decode(row, skip_special_tokens=True) for row in out["responses"].to_list()]
    if list(out["response_text"]) != texts:
        raise CheckFailed("response_text is not the text of `responses` without special tokens")
    if not torch.equal(out["prompt_length"], batch["prompts"].lengths):
        raise CheckFailed("prompt_length is not the length of `prompts`")
    if _tokens(mixed) != [_tokens(out)[row] for row in order]:
        raise CheckFailed("rows of a batch in another order do not get the same responses")
    if len(suite.engine.generate(batch[:0], sampling)):
        raise CheckFailed("a batch without rows got rows")
    return f"{len(out)} rows"


def seeds(suite: RolloutEngineSuite) -> str:
    """The same names give the same samples, any other name others; global random generators have no part in it."""
    batch = suite.batch()
    plain = Sampling(max_tokens=12, min_tokens=12, seed=1, step=2, purpose="train", call=0)
    first = _tokens(suite.engine.generate(batch, plain))
    before = random_state()
    torch.rand(3)
    if _tokens(suite.engine.generate(batch, plain)) != first:
        raise CheckFailed("two calls with the same names give different samples")
    set_random_state(before)
    suite.engine.generate(batch, plain)
    if random_state() != before:
        raise CheckFailed("it draws from a global random generator, as training in the same process may")
    seen = {tuple(row) for row in first}
    changes: list[dict[str, Any]] = [{"seed": 2}, {"step": 3}, {"purpose": "eval"}, {"call": 1}]
    calls = [(batch, replace(plain, **change), change) for change in changes]
    for column, values in (("uid", ["1:0", "1:0", "1:1", "1:1"]), ("sample_index", torch.tensor([2, 3, 2, 3]))):
        other = suite.batch()
        other[column] = values
        calls.append((other, plain, {column: values}))
    for rows, sampling, change in calls:
        new = {tuple(row) for row in _tokens(suite.engine.generate(rows, sampling))}
        if seen & new or len(new) < len(batch):
            raise CheckFailed(f"samples with {change} repeat others; its noise does not depend on every name")
        seen |= new
    return f"{len(seen)} samples, all different; two calls are equal"


def greedy(suite: RolloutEngineSuite) -> str:
    """At temperature 0 every token is the plain model's likeliest, and its log-prob 0."""
    requests = suite.requests(temperature=0.0)
    rows = suite.run([(0, row) for row in requests])
    suite.expect_likely(requests, rows)
    return f"{sum(len(row.tokens) for row in rows.values())} tokens are the likeliest"


def log_probs(suite: RolloutEngineSuite) -> str:
    """Log-probs are those of the distribution that was sampled: the plain model's, at a temperature, with cuts."""
    worst = 0.0
    for options in DISTRIBUTIONS:
        requests = suite.requests(**options)
        worst = max(worst, suite.expect_likely(requests, suite.run([(0, row) for row in requests])))
    return f"{len(DISTRIBUTIONS)} distributions; at most {worst:.2g} nats from the plain model"


def distribution(suite: RolloutEngineSuite) -> str:
    """Tokens are drawn as often as their log-probs say, by chi-squared."""
    sampling, prompt = Sampling(max_tokens=1), suite.prompt(9, 1)
    requests = [Request(str(row), prompt, 7919 * row, sampling) for row in range(DRAWS)]
    rows = suite.run([(0, row) for row in requests])
    probs = suite.reference.log_probs(requests[0], rows["0"])[0].exp()
    likeliest = probs.topk(LIKELIEST).indices.tolist()
    drawn = [row.tokens[0] for row in rows.values()]
    counts = torch.tensor([drawn.count(token) for token in likeliest]).double()
    expected = DRAWS * probs[likeliest].double()
    counts, expected = (torch.cat([each, DRAWS - each.sum()[None]]) for each in (counts, expected))
    found = float(((counts - expected) ** 2 / expected).sum())
    if found > CHI_SQUARED:
        raise CheckFailed(
            f"{DRAWS} draws have chi-squared {found:.1f}; of sound draws 1 in 1000 is above {CHI_SQUARED}"
        )
    return f"{DRAWS} draws, chi-squared {found:.1f} of {LIKELIEST} degrees of freedom"


def ends(suite: RolloutEngineSuite) -> str:
    """A row ends with an end token, which stays in it, or at max_tokens; the reason says which."""
    requests = suite.requests(96, max_tokens=40)
    rows = suite.run([(0, row) for row in requests])
    counts = {"end": 0, "length": 0}
    for row in rows.values():
        at = next((at for at, token in enumerate(row.tokens) if token in suite.reference.end_ids), None)
        wanted = (40, "length", False) if at is None else (at + 1, "end", True)
        if (len(row.tokens), row.reason, row.finished) != wanted or len(row.log_probs) != len(row.tokens):
            raise CheckFailed(
                f"a row has {len(row.tokens)} tokens, {len(row.log_probs)} log-probs and the reason {row.reason!r}; it "
                f"should have {wanted[0]} and {wanted[1]!r}"
            )
        counts[row.reason] += 1
    return f"{counts['end']} rows end with an end token, {counts['length']} at max_tokens"


def min_tokens(suite: RolloutEngineSuite) -> str:
    """No end token is drawn before min_tokens, and no stop string ends a row before."""
    stop = _stops(suite)
    samplings: tuple[dict[str, Any], ...] = ({"min_tokens": 35}, {"min_tokens": 12, "stop": stop})
    for options in samplings:
        rows = suite.run([(0, row) for row in suite.requests(48, max_tokens=40, **options)])
        shortest = min(len(row.tokens) for row in rows.values())
        if shortest < options["min_tokens"]:
            raise CheckFailed(f"with {options} a row has {shortest} tokens")
        if "stop" in options and not any(row.reason == "stop" for row in rows.values()):
            raise CheckFailed(f"with {options} no row ends with the stop string")
    return "96 rows have at least as many tokens"


def stop_strings(suite: RolloutEngineSuite) -> str:
    """A row ends with the token that completes a stop string, also where the row goes on from given tokens."""
    stop, requests = _stops(suite), suite.requests(24, max_tokens=40)
    free = suite.run([(0, row) for row in requests])
    lengths = {name: _length_with_stop(suite, row, stop) for name, row in free.items()}
    for done in (0, 3):
        asked = [
            continued(
                replace(row, sampling=replace(row.sampling, stop=stop)), free[row.id], min(done, lengths[row.id] - 1)
            )
            for row in requests
        ]
        for name, row in suite.run([(0, request) for request in asked]).items():
            whole, length = free[name], lengths[name]
            reason = "stop" if length < len(whole.tokens) else row.reason
            if list(row.tokens) != list(whole.tokens)[:length] or row.reason != reason:
                raise CheckFailed(
                    f"with stop={stop} a row has {len(row.tokens)} tokens and the reason {row.reason!r}; its stop "
                    f"string ends in token {length} of {len(whole.tokens)}"
                )
    _stops_across(suite, requests, free)
    stopped = sum(length < len(free[name].tokens) for name, length in lengths.items())
    return f"{2 * stopped} of {2 * len(free)} rows end with one of {len(stop)} strings"


def _stops_across(suite: RolloutEngineSuite, requests: list[Request], free: Mapping[str, Finished]) -> None:
    """Expect a stop string to end a row that was interrupted between its two characters."""
    for request in requests:
        tokens = free[request.id].tokens
        for at in range(1, len(tokens) - 1):
            pair = suite.reference.tokenizer.decode(tokens[at - 1 : at + 1], skip_special_tokens=True)
            if len(pair) == 2 and pair.isprintable() and pair.isascii():
                stopped = replace(request, sampling=replace(request.sampling, stop=(pair,)))
                row = suite.run([(0, continued(stopped, free[request.id], at))])[request.id]
                if row.reason != "stop" or len(row.tokens) != at + 1:
                    raise CheckFailed("a stop string does not end a row that goes on from its first character")
                return


def prompt_lengths(suite: RolloutEngineSuite) -> str:
    """Prompts of all lengths give the plain model's log-probs, and together the same tokens as alone."""
    lengths = [length for length in LENGTHS if length + 8 <= suite.reference.longest]
    sampling = Sampling(max_tokens=8, min_tokens=8)
    requests = [Request(str(length), suite.prompt(length, length), length, sampling) for length in lengths]
    together = suite.run([(0, row) for row in requests])
    worst = suite.expect_likely(requests, together)
    for request in requests[::4]:
        suite.expect_same(together, suite.run([(0, request)]), f"beside prompts of other lengths than {request.id}")
    return f"{len(lengths)} lengths from 1 to {lengths[-1]} tokens; at most {worst:.2g} nats from the plain model"


def _tokens(out: DataProto) -> list[list[int]]:
    return [row.tolist() for row in out["responses"].to_list()]


def _length_with_stop(suite: RolloutEngineSuite, row: Finished, stop: tuple[str, ...]) -> int:
    """Return the number of tokens up to the one that completes a stop string; all without one."""
    for count in range(1, len(row.tokens)):
        text = suite.reference.tokenizer.decode(row.tokens[:count], skip_special_tokens=True)
        if any(each in text for each in stop):
            return count
    return len(row.tokens)


def _stops(suite: RolloutEngineSuite) -> tuple[str, ...]:
    """Return 12 characters that many responses contain."""
    texts = [suite.reference.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in suite.alone().values()]
    characters = sorted({each for text in texts for each in text if each.isascii() and each.isprintable()})
    if not characters:
        raise CheckFailed("no sampled response has a printable character; give another model.path")
    return tuple(sorted(characters, key=lambda each: -sum(each in text for text in texts))[:12])


CHECKS: dict[str, Callable[[RolloutEngineSuite], str]] = {
    check.__name__: check
    for check in (
        config,
        columns,
        seeds,
        greedy,
        log_probs,
        distribution,
        ends,
        min_tokens,
        stop_strings,
        prompt_lengths,
        request_checks.admission_orders,
        request_checks.mixed_samplings,
        request_checks.continued_rows,
        request_checks.kept_rows,
        request_checks.so_far,
        request_checks.abort,
        request_checks.refusals,
        request_checks.versions,
        request_checks.fingerprint,
        request_checks.dead_update,
        capability_checks.adopted_weights,
        capability_checks.shared_module,
        request_checks.memory,
    )
}
"""All checks by name, in the order of the report card; `memory` closes the engine."""
