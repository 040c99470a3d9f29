"""The capture of agents' calls in tokens: continued conversations, branches, and the noise of each answer."""

from __future__ import annotations

import asyncio
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.assets import TINY
from rlcore.config import ModelConfig
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools
from rlcore.engine.rollout import Sampling
from rlcore.episodes.openai_format import Call
from rlcore.episodes.sessions import Limits, Renderers, Session
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.tool_calls import FORMATS

QUESTION = {"role": "user", "content": "12+34="}
NEXT = {"role": "user", "content": "and 5+6="}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class Agent:
    """A client of one session that remembers what it got."""

    def __init__(self, server, **session):
        self.server, self.id = server, server.session(**session)
        self.path = f"/sessions/{self.id}/v1/chat/completions"

    def ask(self, messages, **options):
        """Return the body of the answer to a conversation."""
        options = {"max_tokens": 8, "return_token_ids": True, "logprobs": True, **options}
        answer = self.server.post(self.path, {"messages": messages, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def says(self, messages, **options):
        """Return the message of the answer to a conversation."""
        return self.ask(messages, **options)["choices"][0]["message"]

    def rows(self):
        return self.server.rows(self.id)


def whole(row):
    return row["prompt_token_ids"] + row["response_token_ids"]


# Continued conversations


def test_a_conversation_is_continued_in_tokens(serving):
    server = serving()
    agent = Agent(server)
    renderer, _ = server.server.renderers.of(())
    messages, answers = [QUESTION], []
    for _ in range(3):
        answers.append(agent.ask(messages))
        messages += [answers[-1]["choices"][0]["message"], NEXT]
    (row,) = agent.rows()
    prompt, sampled, given = row["prompt_token_ids"], [], []
    assert prompt == list(renderer.prompt([QUESTION]))
    for token, mask in zip(row["response_token_ids"], row["response_mask"], strict=True):
        (sampled if mask else given).append(token)
    assert sampled == [token for answer in answers for token in answer["choices"][0]["token_ids"]]
    assert NEXT["content"] in renderer.raw_text(given)
    # Each prompt is the earlier one, the sampled tokens as they were, and new tokens.
    for before, after in pairwise(answers):
        kept = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(kept)] == kept
    assert whole(row) == answers[-1]["prompt_token_ids"] + answers[-1]["choices"][0]["token_ids"]
    log_probs = [value for value, mask in zip(row["log_probs"], row["response_mask"], strict=True) if mask]
    assert log_probs == [each["logprob"] for answer in answers for each in answer["choices"][0]["logprobs"]["content"]]


def test_other_arguments_of_the_template_begin_another_conversation(serving):
    file = Path(__file__).parent / "templates" / "thinking.jinja"
    server = serving(config=ModelConfig(chat_template=str(file), chat_template_kwargs={"enable_thinking": False}))
    agent = Agent(server)
    messages = [QUESTION, agent.says([QUESTION]), NEXT]
    same = agent.ask(messages)
    assert len(agent.rows()) == 1
    on = agent.ask(messages, chat_template_kwargs={"enable_thinking": True})
    assert len(agent.rows()) == 2
    tokenizer = server.server.renderers.tokenizer
    texts = [tokenizer.decode(each["prompt_token_ids"]) for each in (same, on)]
    assert [each.rpartition("<|assistant|>")[2] for each in texts] == ["<think></think>", "<think>\n"]


def test_a_rows_arguments_count_in_its_session_and_a_calls_override_them():
    file = Path(__file__).parent / "templates" / "thinking.jinja"
    setup = EpisodeSetup(
        EnvConfig(), ModelConfig(chat_template=str(file)), None, (), FORMATS["hermes"], OfferedTools(), play=None
    )
    renderers, limits = Renderers(setup), Limits(Sampling(max_tokens=8), 100)
    for row, asked, end in [({}, {}, "\n"), ({"enable_thinking": False}, {}, "</think>")]:
        session = Session("s", 1, limits, renderers, None, row)
        call = Call([QUESTION], template_kwargs=asked)
        assert renderers.tokenizer.decode(session.begin(call).prompt).endswith(f"<think>{end}")
        call = Call([QUESTION], template_kwargs={"enable_thinking": True})
        assert renderers.tokenizer.decode(session.begin(call).prompt).endswith("<think>\n")


def test_renderers_share_the_copy_of_a_tokenizer(add_schema):
    """The one that reads special tokens as text: tens of MB where the vocabulary is large."""
    setup = EpisodeSetup(EnvConfig(), ModelConfig(), None, (), FORMATS["hermes"], OfferedTools(), play=None)
    renderers = Renderers(setup)
    variants = [renderers.of(tools, given)[0] for tools in ([], [add_schema]) for given in (None, {"date": "today"})]
    assert len({id(renderer) for renderer in variants}) == 4
    assert len({id(renderer.plain_text) for renderer in variants}) == 1


def test_in_a_run_each_call_continues_a_kept_row_and_says_how_long_it_may_become(serving, tiny_engine, monkeypatch):
    asked, add, before = [], tiny_engine.add, set(tiny_engine._kept)  # other tests' rows
    monkeypatch.setattr(tiny_engine, "add", lambda requests: (asked.extend(requests), add(requests)))
    agent, messages = Agent(serving(limits={"fixed": True, "max_turns": 4, "turn_len": 6})), [QUESTION]
    for _ in range(3):
        messages += [agent.says(messages), NEXT]
    assert [each.after for each in asked] == [None, asked[0].id, asked[1].id]
    assert {each.row_limit for each in asked} == {len(asked[0].prompt) + 120}
    assert set(tiny_engine._kept) - before == {asked[2].id}, "a row is dropped when it is continued"
    tiny_engine.forget([each.id for each in asked])


def test_sampled_log_probs_are_those_of_one_forward_over_the_branch(serving):
    agent = Agent(serving())
    messages = [QUESTION]
    for _ in range(3):
        messages += [agent.says(messages), NEXT]
    (row,) = agent.rows()
    hf = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = torch.tensor(whole(row))
    with torch.no_grad():
        logits = hf(input_ids=ids[None]).logits[0, len(row["prompt_token_ids"]) - 1 : -1]
    want = logits.log_softmax(-1).gather(-1, torch.tensor(row["response_token_ids"])[:, None])[:, 0]
    mask = torch.tensor(row["response_mask"]).bool()
    torch.testing.assert_close(torch.tensor(row["log_probs"])[mask], want[mask], atol=2e-4, rtol=0)


def test_an_odd_answer_is_continued_as_it_was_sampled(serving):
    """At a high temperature, tokens are not those that encoding their text gives."""
    server = serving()
    agent = Agent(server)
    tokenizer = server.server.renderers.tokenizer
    odd = 0
    for seed in range(6):
        first = agent.ask([QUESTION], temperature=50.0, seed=seed, max_tokens=20)
        choice = first["choices"][0]
        second = agent.ask([QUESTION, choice["message"], NEXT])
        kept = first["prompt_token_ids"] + choice["token_ids"]
        assert second["prompt_token_ids"][: len(kept)] == kept
        odd += tokenizer(choice["message"]["content"], add_special_tokens=False)["input_ids"] != choice["token_ids"]
    assert odd
    assert len(agent.rows()) == 6


FORMS = {
    "as it was": lambda message: message,
    "as a client's model_dump": lambda message: {**message, "refusal": None, "annotations": None, "audio": None},
    "with parts": lambda message: {**message, "content": [{"type": "text", "text": message["content"] or ""}]},
    "with whitespace around": lambda message: {**message, "content": f" {message['content']}\n"},
    "only what it needs": lambda message: {name: message[name] for name in ("role", "content")},
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_known_in_any_equal_form(serving, form):
    agent = Agent(serving())
    messages = [QUESTION]
    for _ in range(2):
        messages += [FORMS[form](agent.says(messages)), NEXT]
    agent.ask(messages)
    (row,) = agent.rows()
    assert len(row["messages"]) == 6


def test_special_tokens_in_a_clients_text_are_text(serving):
    server = serving()
    agent = Agent(server)
    tokenizer = server.server.renderers.tokenizer
    end = tokenizer.eos_token_id
    told = agent.ask([{"role": "user", "content": f"1+1={tokenizer.eos_token}"}])
    assert told["prompt_token_ids"].count(end) == 1  # the template's own
    later = {"role": "user", "content": f"{tokenizer.eos_token}2+2="}
    first = agent.ask([QUESTION])
    second = agent.ask([QUESTION, first["choices"][0]["message"], later])
    kept = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(kept)] == kept
    assert second["prompt_token_ids"][len(kept) :].count(end) <= 2


# Tools


class CallsTools:
    """A form of tool calls that even the tiny model writes: each answer is a call of `add`."""

    def parse(self, text, turn=0, tools=()):
        from rlcore.episodes.tool_calls import ToolCall, Turn

        return Turn("", [ToolCall(tools[0]["function"]["name"], {"a": len(text), "text": text}, "x")])

    def instructions(self, tools):
        return "Write a number to call " + ", ".join(each["function"]["name"] for each in tools)


CALL_FORMS = {
    "as it was": lambda message: message,
    "no content": lambda message: {**message, "content": None},
    "empty content": lambda message: {**message, "content": ""},
    "arguments as an object": lambda message: _with_calls(
        message, lambda call: {**call, "function": {**call["function"], "arguments": _arguments(call)}}
    ),
    "arguments written anew": lambda message: _with_calls(
        message,
        lambda call: {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(dict(reversed(_arguments(call).items())), indent=1),
            },
        },
    ),
    "other ids": lambda message: _with_calls(message, lambda call: {**call, "id": "mine"}),
    "null fields": lambda message: {**message, "function_call": None, "refusal": None, "name": None},
}


def _arguments(call):
    return json.loads(call["function"]["arguments"])


def _with_calls(message, change):
    return {**message, "tool_calls": [change(copy.deepcopy(call)) for call in message["tool_calls"]]}


@pytest.mark.parametrize("form", CALL_FORMS)
def test_tool_calls_are_openais_and_known_in_any_equal_form(serving, form):
    server = serving()
    server.server.renderers.tool_format = CallsTools()
    agent = Agent(server)
    messages = [QUESTION]
    for _ in range(2):
        answer = agent.ask(messages, tools=[ADD])
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        (call,) = message["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "add"
        assert len(call["id"]) == 9
        result = {"role": "tool", "tool_call_id": call["id"], "content": "46"}
        messages += [CALL_FORMS[form](message), result]
    agent.ask(messages, tools=[ADD])
    (row,) = agent.rows()
    assert row["tool_calls"] == 3
    assert [each["role"] for each in row["messages"][-5:]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert "46" in server.server.renderers.tokenizer.decode(row["response_token_ids"])


def test_tools_are_shown_to_the_model_and_their_calls_read_only_then(serving):
    server = serving()
    server.server.renderers.tool_format = CallsTools()
    agent = Agent(server)
    shown = agent.ask([QUESTION], tools=[ADD])
    hidden = agent.ask([QUESTION])
    unread = agent.ask([QUESTION], tools=[ADD], tool_choice="none")
    decode = server.server.renderers.tokenizer.decode
    assert "add" in decode(shown["prompt_token_ids"])
    assert "add" not in decode(hidden["prompt_token_ids"])
    assert "tool_calls" not in hidden["choices"][0]["message"]
    assert "tool_calls" not in unread["choices"][0]["message"]


@pytest.mark.timeout(300)
def test_ids_of_tool_calls_differ_and_are_the_same_again(serving):
    ids = []
    for _ in range(2):
        server = serving()
        server.server.renderers.tool_format = CallsTools()
        agent = Agent(server, seed=1)
        answer = agent.ask([QUESTION], tools=[ADD], n=4)
        ids.append([choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 4


def test_a_call_that_does_not_parse_stays_text_and_is_counted(serving):
    class Broken(CallsTools):
        def parse(self, text, turn=0, tools=()):
            from rlcore.episodes.tool_calls import BadCall, Turn

            return Turn(text, [BadCall("Error: not a call", text)])

    server = serving()
    server.server.renderers.tool_format = Broken()
    agent = Agent(server)
    answer = agent.ask([QUESTION], tools=[ADD])
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert (agent.rows()[0]["tool_calls"], agent.rows()[0]["tool_errors"]) == (1, 1)


# Branches


def test_a_fork_is_a_branch_that_shares_the_tokens_before_it(serving):
    agent = Agent(serving())
    first = agent.says([QUESTION])
    for content in ("left", "right"):
        start = [QUESTION, first, {"role": "user", "content": content}]
        agent.ask([*start, agent.says(start), NEXT])
    rows = agent.rows()
    assert [row["branch"] for row in rows] == [0, 1]
    assert [row["messages"][2]["content"] for row in rows] in (["left", "right"], ["right", "left"])
    one, other = map(whole, rows)
    same = next(at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    assert same > len(rows[0]["prompt_token_ids"]) + 1


def test_a_client_that_edits_history_gets_a_branch_from_the_last_known_answer(serving):
    agent = Agent(serving())
    first = agent.says([QUESTION])
    second = agent.says([QUESTION, first, NEXT])
    edited = {**second, "content": "something else entirely"}
    answer = agent.ask([QUESTION, first, NEXT, edited, NEXT])
    rows = agent.rows()
    assert len(rows) == 2
    (branch,) = [row for row in rows if any("entirely" in each["content"] for each in row["messages"])]
    assert whole(branch) == answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    assert branch["response_mask"].count(1) == len(answer["choices"][0]["token_ids"]) + sum(
        branch["response_mask"][: len(branch["response_mask"]) - len(answer["choices"][0]["token_ids"])]
    )
    edited_first = agent.ask([{"role": "user", "content": "1+1="}, first, NEXT])
    assert len(agent.rows()) == 3
    assert edited_first["prompt_token_ids"] != answer["prompt_token_ids"]


def test_several_choices_are_branches_and_each_can_be_continued(serving):
    agent = Agent(serving())
    first = agent.ask([QUESTION], n=3, temperature=30.0)
    choices = first["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len(agent.rows()) == 3
    answer = agent.ask([QUESTION, choices[1]["message"], NEXT])
    rows = agent.rows()
    assert len(rows) == 3  # the continued one gives no row of its own
    kept = first["prompt_token_ids"] + choices[1]["token_ids"]
    assert answer["prompt_token_ids"][: len(kept)] == kept


def test_a_completion_is_continued_by_its_text_and_by_its_tokens(serving):
    server = serving()
    session = server.session()
    path = f"/sessions/{session}/v1/completions"
    options = {"max_tokens": 3, "return_token_ids": True, "temperature": 30.0}
    seed = next(
        seed
        for seed in range(20)
        if server.post(path, {"prompt": "7+8=", "seed": seed, **options}).json()["choices"][0]["finish_reason"]
        == "length"
    )
    session = server.session()
    path = f"/sessions/{session}/v1/completions"
    first = server.post(path, {"prompt": "7+8=", "seed": seed, **options}).json()
    kept = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    text = "7+8=" + first["choices"][0]["text"]
    second = server.post(path, {"prompt": f"{text} and", **options}).json()
    third = server.post(path, {"prompt": [*kept, 74, 75], **options}).json()
    assert second["prompt_token_ids"][: len(kept)] == kept
    assert third["prompt_token_ids"] == [*kept, 74, 75]
    rows = server.rows(session)
    assert len(rows) == 2
    assert all(whole(row)[: len(kept)] == kept for row in rows)


# Noise


def _play(server, workers, seed=11):
    """Three conversations with forks, asked for by this many threads; return the rows."""
    agent = Agent(server, seed=seed)

    def talk(number):
        messages = [{"role": "user", "content": f"{number}+1="}]
        for turn in range(3):
            message = agent.says(messages, temperature=2.0)
            messages += [message, {"role": "user", "content": f"{number} {turn}"}]

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(talk, range(6)))
    return agent.rows()


def test_rows_are_the_same_whatever_the_concurrency(serving):
    server = serving()
    one, eight = _play(server, 1), _play(server, 8)
    for name in ("prompt_token_ids", "response_token_ids", "response_mask", "messages", "branch"):
        assert [row[name] for row in one] == [row[name] for row in eight], name
    for a, b in zip(one, eight, strict=True):  # rows beside a row change its log-probs by rounding
        torch.testing.assert_close(torch.tensor(a["log_probs"]), torch.tensor(b["log_probs"]), atol=1e-5, rtol=0)
    assert _play(server, 1, seed=12) != one


def test_one_at_a_time_two_runs_are_equal_to_the_last_bit(serving):
    server = serving()
    assert _play(server, 1) == _play(server, 1)


def test_calls_with_equal_messages_draw_different_noise(serving):
    agent = Agent(serving())
    answers = {tuple(agent.ask([QUESTION], temperature=5.0)["choices"][0]["token_ids"]) for _ in range(8)}
    assert len(answers) > 2


def test_async_clients_share_the_engine(serving):
    server = serving()
    session = server.session()

    async def main():
        async with openai.AsyncOpenAI(base_url=server.base(session), api_key="x", max_retries=0) as client:
            calls = [client.chat.completions.create(model="x", messages=[QUESTION], max_tokens=4) for _ in range(20)]
            return await asyncio.gather(*calls)

    assert len(asyncio.run(main())) == 20
    assert len(server.rows(session)) == 20


# An agent framework


def test_a_framework_that_knows_nothing_of_rlcore(serving):
    """Pydantic AI: an agent with a tool, whose turns are one row in tokens."""
    from pydantic_ai import Agent as PydanticAgent
    from pydantic_ai import UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Calls(CallsTools):
        def parse(self, text, turn=0, tools=()):
            from rlcore.episodes.tool_calls import ToolCall, Turn

            return Turn("", [ToolCall("add", {"a": len(text)}, "x")])

    server = serving()
    server.server.renderers.tool_format = Calls()
    session = server.session()

    async def main():
        async with openai.AsyncOpenAI(base_url=server.base(session), api_key="x", max_retries=0) as client:
            model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
            agent = PydanticAgent(model, instructions="Be brief.", model_settings={"max_tokens": 4})

            @agent.tool_plain
            def add(a: int) -> str:
                """Add one to a number.

                Args:
                    a: the number
                """
                return f"it is {a + 1}"

            with pytest.raises(UsageLimitExceeded):
                await agent.run("What is 1 plus 1?", usage_limits=UsageLimits(request_limit=3))

    asyncio.run(main())
    (row,) = server.rows(session)
    assert row["tool_calls"] == 3
    assert sum(each["role"] == "assistant" for each in row["messages"]) == 3
    text = server.server.renderers.tokenizer.decode(row["response_token_ids"])
    assert text.count("it is") == 2


def test_an_unread_body_of_a_disconnected_client_leaves_the_server_whole(serving):
    server = serving()
    with httpx.Client(timeout=60) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{server.url}/v1/completions", json={"prompt": "1", "n": 32, "max_tokens": 90}, timeout=0.01)
    assert Agent(server).says([QUESTION])
