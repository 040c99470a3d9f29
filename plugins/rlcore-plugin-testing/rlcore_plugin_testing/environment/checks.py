"""The checks on an environment, and the list of all checks.

A check takes an EnvironmentSuite and returns what it looked at, in a few words. It raises CheckFailed with what is
wrong, or NotApplicable with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from rlcore import DataProto
from rlcore.config import from_yaml, to_yaml
from rlcore.engine import Finished
from rlcore.episodes.from_config import check_environment
from rlcore.episodes.prompts import Prompts
from rlcore.plugins.specs import has_scores
from rlcore_plugin_testing.environment import fault_checks
from rlcore_plugin_testing.environment.engines import SCRIPT_VERSION
from rlcore_plugin_testing.environment.suite import (
    AT_A_TIME,
    SAMPLED,
    SCRIPTED,
    TEMPERATURE,
    TOLERANCE,
    EnvironmentSuite,
    Played,
    expect_same,
)
from rlcore_plugin_testing.report import CheckFailed, NotApplicable

POLICIES = (SCRIPTED, SAMPLED)


def config(suite: EnvironmentSuite) -> str:
    """The settings pass the environment's check and read back equal, and the class loads in its own process."""
    check_environment(suite.config, suite.manager)
    if from_yaml(to_yaml(suite.config), suite.manager) != suite.config:
        raise CheckFailed("the config that is saved with a run is not the same when it is read back")
    setup = suite.setup
    setup.check()
    own = suite.config.sections.get(f"env.{suite.name}")
    tools = ", ".join(tool["function"]["name"] for tool in setup.tools)
    return f"{0 if own is None else len(dataclasses.fields(own))} settings; tools: {tools or 'none'}"


def episodes(suite: EnvironmentSuite) -> str:
    """Every episode ends without a failure, with a turn of the policy, and with a score if the class gives one."""
    scores = has_scores(suite.config, suite.manager)
    count = {"rows": 0, "turns": 0, "calls": 0, "errors": 0}
    for policy in POLICIES:
        for (name, branch), row in suite.plain(policy).rows.items():
            if not row["turns"]:
                raise CheckFailed(f"episode {name} of the {policy} policy has no turn in branch {branch}")
            if scores and row["episode_score"] is None:
                raise CheckFailed(f"episode {name} of the {policy} policy ended without a score")
            numbers = [*row["turn_rewards"], row["episode_score"] or 0.0]
            if not all(map(math.isfinite, numbers)):
                raise CheckFailed(f"episode {name} of the {policy} policy has the rewards {numbers}")
            count["rows"] += 1
            count["turns"] += row["turns"]
            count["calls"] += row["tool_calls"]
            count["errors"] += row["tool_errors"]
    return "{rows} rows, {turns} turns, {calls} tool calls, {errors} of them answered with an error".format(**count)


def same_seed(suite: EnvironmentSuite) -> str:
    """The same seed and turns give the same episode: in new processes, and in those that have played others."""
    for policy in POLICIES:
        want = suite.plain(policy)
        with suite.source(policy) as play:
            for what in ("a second time, in new processes", "a third time, in the same processes"):
                expect_same(play(), want, f"the {policy} batch {what}", TOLERANCE)
    return f"{len(POLICIES)} policies, each three times"


def fresh_rendering(suite: EnvironmentSuite) -> str:
    """A row's tokens are those of the whole conversation, rendered once by the chat template."""
    if suite.setup.env.template != "exact":
        raise NotApplicable(f"env.template={suite.setup.env.template} promises no fresh rendering")
    count = 0
    for policy in POLICIES:
        played = suite.plain(policy)
        for number in range(len(played.out)):
            count += _expect_fresh(suite, played, number)
    if not count:
        raise NotApplicable("no row's turns are encoded as the tokenizer encodes their texts")
    return f"{count} rows are their conversations' renderings"


def _expect_fresh(suite: EnvironmentSuite, played: Played, number: int) -> bool:
    """Compare one row; False for one that has no fresh rendering.

    These are rows whose sampled tokens the tokenizer would not give for their text, and further seats' conversations,
    whose first messages are in no column.
    """
    renderer, tokenizer, out = suite.renderer, suite.tokenizer, played.out
    messages = list(out["episode_messages"][number])
    while messages[-1]["role"] != "assistant":
        messages.pop()  # those after the last turn are no tokens
    seat, opening = _opening(played, number)
    if int(out["branch"][number]) != seat or not _is_canonical(suite, messages, _turns(out, number)):
        return False
    row = int(out["episode_row"][number])
    first = Prompts(played.batch, renderer, suite.setup).conversation(row, opening).messages
    got = [*out["prompts"][number].tolist(), *out["responses"][number].tolist()]
    want = renderer.fresh([*first, *messages])
    if want[: len(got)] == got:
        return True
    at = next((at for at, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    raise CheckFailed(
        f"row {number}: token {at} of {len(got)} is {tokenizer.decode(got[at : at + 1])!r}, and that of a fresh "
        f"rendering {tokenizer.decode(want[at : at + 1])!r}, after {tokenizer.decode(want[max(0, at - 40) : at])!r}"
    )


def _opening(played: Played, number: int) -> tuple[int, Any]:
    """Return the seat of the first turn of a row's episode, and the prompt that the environment gave it, or None."""
    record = played.records.get(str(int(played.out["episode_row"][number])))
    return (0, None) if record is None else record.opening


def _is_canonical(suite: EnvironmentSuite, messages: list[dict[str, Any]], turns: list[list[int]]) -> bool:
    """Whether the tokens of each turn are those that the tokenizer gives for its text."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    for text, tokens in zip(said[-len(turns) :], turns, strict=True):
        body = tokens[:-1] if tokens[-1] in suite.renderer.end_ids else tokens
        if suite.tokenizer(text, add_special_tokens=False)["input_ids"] != body:
            return False
    return True


def _turns(out: DataProto, number: int) -> list[list[int]]:
    """Return the sampled tokens of each turn of a row."""
    response, mask = out["responses"][number].tolist(), out["response_mask"][number].tolist()
    turns, begin = [], 0
    for end in out["turn_ends"][number].tolist():
        turns.append([token for token, sampled in zip(response[begin:end], mask[begin:end], strict=True) if sampled])
        begin = end
    return turns


def masks(suite: EnvironmentSuite) -> str:
    """response_mask is 1 on the tokens that the engine sampled, and on no other; so are log-probs and turn ends."""
    count = 0
    for policy in POLICIES:
        played = suite.plain(policy)
        for number in range(len(played.out)):
            count += _expect_masks(played, number)
    return f"{count} sampled tokens"


def _expect_masks(played: Played, number: int) -> int:
    """Compare one row with the engine's; return its sampled tokens."""
    response = played.out["responses"][number].tolist()
    mask, log_probs = played.out["response_mask"][number].tolist(), played.out["rollout_log_probs"][number]
    expected, given = [0] * len(response), torch.zeros(len(response))
    for begin, row in _engine_rows(played, number):
        expected[begin : begin + len(row.tokens)] = [1] * len(row.tokens)
        given[begin : begin + len(row.tokens)] = torch.tensor(row.log_probs)
    if mask != expected:
        raise CheckFailed(f"row {number}: response_mask has {sum(mask)} ones; {sum(expected)} tokens were sampled")
    if not torch.allclose(log_probs, given, rtol=0, atol=1e-6):
        raise CheckFailed(f"row {number}: rollout_log_probs are not the engine's, or not 0 on the other tokens")
    return sum(mask)


def _engine_rows(played: Played, number: int) -> list[tuple[int, Finished]]:
    """Return the engine's rows of a row's turns, each with the place of its first token in the response.

    Of several rows with the same tokens, those of a group's other episodes, it takes one with equal log-probs.
    """
    out = played.out
    prompt, response = out["prompts"][number].tolist(), out["responses"][number].tolist()
    mask, log_probs = out["response_mask"][number].tolist(), out["rollout_log_probs"][number]
    found, at = [], 0
    for end, turn in zip(out["turn_ends"][number].tolist(), _turns(out, number), strict=True):
        begin = next((place for place in range(at, end) if mask[place]), end)
        before = (*prompt, *response[:begin])
        same = [row for request, row in played.turns if request.prompt == before and list(row.tokens) == turn]
        if not same:
            raise CheckFailed(
                f"row {number}: the {len(turn)} tokens with response_mask 1 from number {begin} up to the end of the "
                f"turn at {end} are none that the engine sampled after the {begin} before them"
            )
        own = log_probs[begin : begin + len(turn)]
        found.append((begin, min(same, key=lambda row: float((torch.tensor(row.log_probs) - own).abs().max()))))
        at = end
    return found


@torch.no_grad()
def log_probs(suite: EnvironmentSuite) -> str:
    """Log-probs of sampled tokens equal those of one forward of the plain model over the whole branch."""
    played, worst, count = suite.plain(SAMPLED), 0.0, 0
    out = played.out
    for number in range(len(out)):
        prompt, response = out["prompts"][number], out["responses"][number]
        by_model = torch.zeros(len(response), dtype=torch.bool)
        for begin, row in _engine_rows(played, number):
            by_model[begin : begin + len(row.tokens)] = row.weights_version != SCRIPT_VERSION
        logits = suite.hf(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
        want = (logits / TEMPERATURE).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        off = (out["rollout_log_probs"][number] - want).abs() * by_model
        if not bool((off <= TOLERANCE).all()):
            at = int(off.argmax())
            raise CheckFailed(
                f"row {number}: the log-prob of token {at} of {len(off)} is {float(off[at]):.3g} nats from that of a "
                "forward over the whole branch"
            )
        worst, count = max(worst, float(off.max())), count + int(by_model.sum())
    if not count:
        raise NotApplicable("no episode came to a turn of the model")
    return f"{count} tokens; at most {worst:.2g} nats from the plain model"


def one_at_a_time(suite: EnvironmentSuite) -> str:
    """Episodes that are played one at a time, or in another order, are those that are played together."""
    order = list(range(len(suite.batch)))[::-1]
    for policy in POLICIES:
        want = suite.plain(policy)
        for what, keys in (("one at a time", {"concurrency": 1}), ("all at once", {"concurrency": len(order)})):
            played = suite.play(policy, suite.batch[order], **keys)
            expect_same(played, want, f"the {policy} batch {what}, in another order", TOLERANCE)
    return f"{len(order)} episodes one at a time, {AT_A_TIME} and all at a time"


CHECKS: dict[str, Callable[[EnvironmentSuite], str]] = {
    check.__name__: check
    for check in (
        config,
        episodes,
        same_seed,
        one_at_a_time,
        fresh_rendering,
        masks,
        log_probs,
        fault_checks.failures,
        fault_checks.kill_and_resume,
        fault_checks.nothing_left,
    )
}
"""All checks by name, in the order of the report card."""
