"""The HTTP side of `rlcore serve`: real requests over loopback, answered by the tiny model."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from rlcore.config import ModelConfig
from rlcore.data.chat import load_tokenizer
from rlcore.episodes.openai_format import GrowingText

QUESTION = [{"role": "user", "content": "12+34="}]
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def error(response, status, code=None):
    """Check that a response is an error in OpenAI's form, and return its message."""
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert code is None or body["code"] == code, body
    return body["message"]


# Answers


def test_the_openai_client_gets_an_answer_with_all_that_was_sampled(serving):
    server = serving()
    session = server.session()
    answer = server.client(session).chat.completions.create(
        model="any", messages=QUESTION, logprobs=True, max_tokens=8, extra_body={"return_token_ids": True}
    )
    (choice,), (row,) = answer.choices, server.rows(session)
    tokenizer = server.server.renderers.tokenizer
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.prompt_token_ids == row["prompt_token_ids"]
    assert answer.prompt_token_ids == list(server.server.renderers.of(())[0].prompt(QUESTION))
    assert choice.token_ids == row["response_token_ids"]
    assert [each.logprob for each in choice.logprobs.content] == row["log_probs"]
    assert [each.token for each in choice.logprobs.content] == [tokenizer.decode([each]) for each in choice.token_ids]
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert row["response_mask"] == [1] * len(choice.token_ids)
    assert row["weights_versions"] == [0] * len(choice.token_ids)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert answer.usage.total_tokens == len(answer.prompt_token_ids) + len(choice.token_ids)


def test_the_tokens_are_those_of_the_engine_for_the_same_key(serving, tiny_engine):
    from rlcore.engine.rollout import Request, Sampling
    from rlcore.ops import noise_key

    server = serving(limits={"fixed": True})
    session = server.session(seed=5)
    answer = server.client(session).chat.completions.create(
        model="any", messages=QUESTION, temperature=0.0, seed=1, extra_body={"return_token_ids": True}
    )
    live = server.server.store.get(session)
    (name,) = live._asked
    key = noise_key(noise_key("session", 5), "call", name, 0)
    sampling = Sampling(max_tokens=120, seed=3)
    server.calls.end()
    server.thread.join()
    tiny_engine.add([Request("again", tuple(answer.prompt_token_ids), key, sampling)])
    done = []
    while tiny_engine.in_flight:
        done += tiny_engine.step()
    assert list(done[0].tokens) == answer.choices[0].token_ids


def test_a_stream_has_the_same_answer_in_chunks(serving):
    server = serving()
    client = server.client(server.session())
    options = {"model": "tiny", "messages": QUESTION, "seed": 7, "max_tokens": 8, "logprobs": True, "n": 2}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert [each.finish_reason for each in own] == [None, None, choice.finish_reason]
        assert own[1].logprobs.content == choice.logprobs.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**options, "stream": True}) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_sends_each_part_while_the_rest_is_sampled(serving, tiny_engine, monkeypatch, endpoint):
    """The engine samples a token only after the client has read the one before."""
    may_step, step = threading.Semaphore(1), tiny_engine.step

    def waiting_step():
        assert not tiny_engine.in_flight or may_step.acquire(timeout=20), "the client has read nothing"
        return step()

    server = serving()
    client = server.client(server.session())
    monkeypatch.setattr(tiny_engine, "step", waiting_step)
    options = {"model": "tiny", "temperature": 0.0, "max_tokens": 8, "stream": True}
    if endpoint == "chat":
        stream, prompt = client.chat.completions.create(messages=QUESTION, **options), None
    else:
        prompt = list(server.server.renderers.of(())[0].prompt(QUESTION))
        stream = client.completions.create(prompt=prompt, **options)
    parts, reasons = [], []
    for chunk in stream:
        choice = chunk.choices[0]
        if text := choice.text if prompt else choice.delta.content:
            parts.append(text)
            may_step.release()
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert parts == ["4", "6"]
    assert reasons == ["stop"]


def test_streams_of_several_choices_with_a_stop_string_are_the_whole_answers(serving):
    server = serving()
    client = server.client(server.session())
    for stop in (None, "1", ["23", "4"]):
        options = {"model": "tiny", "messages": QUESTION, "seed": 3, "n": 4, "max_tokens": 12, "stop": stop}
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
        for index, choice in enumerate(whole.choices):
            own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert "".join(each.delta.content or "" for each in own) == choice.message.content
            assert [each.finish_reason for each in own if each.finish_reason] == [choice.finish_reason]


def test_a_text_grows_by_what_later_tokens_cannot_change(serving):
    class Bytes:
        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            assert skip_special_tokens
            assert not clean_up_tokenization_spaces
            return bytes(ids).decode(errors="replace")

    def parts(text, stop=()):
        growing, found = GrowingText(Bytes(), stop), []
        for length in range(1, len(text.encode()) + 1):
            growing.add(list(text.encode()[:length]))
            found.append(growing.next())
            assert growing.next() == ""
        assert growing.sent == "".join(found)
        return found

    assert parts("aéb") == ["a", "", "é", "b"]
    assert parts("a€") == ["a", "", "", "€"]
    assert parts("abcd", stop=["cd!"]) == ["", "", "a", "b"]  # "cd" may begin the stop string
    assert "".join(parts("abcd!", stop=["cd!"])) == "ab"


def test_a_client_that_leaves_a_stream_ends_its_rows(serving, tiny_engine, monkeypatch):
    step = tiny_engine.step

    def slow_step():
        time.sleep(0.01 if tiny_engine.in_flight else 0)
        return step()

    server = serving()
    session = server.session()
    monkeypatch.setattr(tiny_engine, "step", slow_step)
    stream = server.client(session).chat.completions.create(
        model="tiny", messages=QUESTION, stream=True, n=8, max_tokens=400, temperature=5.0
    )
    next(iter(stream))
    assert server.server.store.get(session).pending == 1
    stream.close()
    until = time.monotonic() + 20
    while tiny_engine.in_flight or server.server.store.get(session).pending:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_completions_take_text_and_token_ids(serving):
    server = serving()
    session = server.session()
    client = server.client(session)
    text = client.completions.create(
        model="tiny", prompt="1+2=", max_tokens=4, seed=1, logprobs=1, extra_body={"return_token_ids": True}
    )
    ids = client.completions.create(
        model="tiny", prompt=text.prompt_token_ids, max_tokens=4, seed=1, extra_body={"return_token_ids": True}
    )
    assert text.object == "text_completion"
    assert ids.choices[0].token_ids == text.choices[0].token_ids
    assert ids.choices[0].text == text.choices[0].text
    assert len(text.choices[0].logprobs.token_logprobs) == len(text.choices[0].token_ids)
    streamed = list(client.completions.create(model="tiny", prompt="1+2=", max_tokens=4, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text
    assert len(server.rows(session)) == 3


def test_client_settings_count_where_no_run_fixes_them(serving):
    server = serving()
    client = server.client(server.session())

    def ask(**options):
        answer = client.chat.completions.create(
            model="tiny", messages=QUESTION, extra_body={"return_token_ids": True}, **options
        )
        return answer.choices[0]

    assert len({tuple(ask(temperature=5.0, max_tokens=6).token_ids) for _ in range(6)}) > 1
    assert len({tuple(ask(temperature=0.0, max_tokens=6).token_ids) for _ in range(3)}) == 1
    assert ask(seed=4, temperature=3.0).token_ids == ask(seed=4, temperature=3.0).token_ids
    assert len(ask(max_tokens=1).token_ids) == 1
    assert ask(max_tokens=1).finish_reason == "length"


def test_a_stop_string_ends_an_answer_and_is_not_in_its_text(serving):
    server = serving()
    session = server.session()
    client = server.client(session)
    options = {"model": "tiny", "prompt": "1+2=", "max_tokens": 12, "seed": 2, "temperature": 30.0}
    text = client.completions.create(**options).choices[0].text
    stop = next(each for each in text[1:] if each not in text[0])
    cut = client.completions.create(**options, stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == text[: text.index(stop)]
    kept = [
        server.server.renderers.tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)
        for row in server.rows(session)
    ]
    assert text[: text.index(stop) + 1] in kept  # the row has what was sampled


def test_the_models_are_the_one_that_is_served(serving):
    server = serving()
    assert [each.id for each in server.client().models.list()] == ["tiny"]
    assert server.client(server.session()).models.retrieve("tiny").object == "model"


# Sessions


def test_a_reward_is_kept_and_the_last_one_counts(serving):
    server = serving()
    session = server.session()
    server.post(f"/sessions/{session}/reward", {"reward": 1})
    server.client(session).post("/reward", body={"reward": 0.5}, cast_to=object)  # by the client's own base_url
    assert server.get(f"/sessions/{session}").json()["reward"] == 0.5
    for value in ("1", None, True, 1e39):
        assert "finite" in error(server.post(f"/sessions/{session}/reward", {"reward": value}), 400)
    raw = httpx.post(f"{server.url}/sessions/{session}/reward", content=b'{"reward": NaN}')
    assert "finite" in error(raw, 400)


def test_an_ended_session_is_gone_and_its_rows_come_with_the_end(serving):
    server = serving()
    first, second = server.session(), server.session()
    server.client(first).chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
    ended = httpx.delete(f"{server.url}/sessions/{first}").json()
    assert len(ended["rows"]) == 1
    assert server.post(f"/sessions/{second}/end").json()["rows"] == []
    error(server.post(f"/sessions/{first}/v1/chat/completions", {"messages": QUESTION}), 404, "session_not_found")
    error(server.get(f"/sessions/{second}"), 404, "session_not_found")


def test_stateless_agents_have_a_session_by_header_or_the_implicit_one(serving):
    server = serving()
    client = server.client(default_headers={"X-Session-ID": "mine"})
    client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
    server.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
    assert len(server.rows("mine")) == 1
    assert len(server.rows("default")) == 1
    bad = server.post("/v1/chat/completions", {"messages": QUESTION}, headers={"X-Session-ID": "a/b"})
    assert "letters" in error(bad, 400)


def test_the_implicit_session_begins_anew_instead_of_growing(serving):
    server = serving(limits={"held_tokens": 300})
    client = server.client()
    for _ in range(40):
        client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8)
    assert server.server.store.get("default").held <= 300
    path = f"/sessions/{server.session()}/v1/chat/completions"
    answers = [server.post(path, {"messages": QUESTION, "max_tokens": 8}) for _ in range(40)]
    assert "begin another" in error(answers[-1], 400, "session_too_long")


def test_idle_sessions_expire(serving):
    server = serving(idle_seconds=0.3)
    session = server.session()
    assert server.get(f"/sessions/{session}").status_code == 200
    until = time.monotonic() + 10
    while server.get("/health").json()["sessions"] and time.monotonic() < until:
        time.sleep(0.05)
    error(server.get(f"/sessions/{session}"), 404)


def test_nothing_of_an_ended_session_is_kept(serving):
    """The ten minutes of benchmarks/serve_load.py measure the process; here no object is left."""
    from rlcore.episodes.conversation import Conversation
    from rlcore.episodes.sessions import Answer, Pending, Session

    server = serving()
    for number in range(30):
        path = f"/sessions/{server.session()}"
        messages = [{"role": "user", "content": f"{number}+1="}]
        message = server.post(f"{path}/v1/chat/completions", {"messages": messages}).json()["choices"][0]["message"]
        server.post(f"{path}/v1/chat/completions", {"messages": [*messages, message, QUESTION[0]], "n": 2})
        server.post(f"{path}/end")
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) in (Session, Answer, Pending, Conversation)]
    assert len(left) <= 4  # the last request's frame may still be there
    assert not server.calls._waiting


def test_too_many_sessions_are_refused(serving):
    server = serving(most_sessions=2)
    kept = [server.session(), server.session()]
    assert "2 sessions" in error(server.post("/sessions"), 429, "too_many_sessions")
    server.post(f"/sessions/{kept[0]}/end")
    assert server.session()


# Arguments of the chat template


def test_a_requests_arguments_override_the_models(serving):
    file = Path(__file__).parent / "templates" / "thinking.jinja"
    off = ModelConfig(chat_template=str(file), chat_template_kwargs={"enable_thinking": False})
    server, tokenizer = serving(config=off), load_tokenizer(ModelConfig())
    client = server.client()

    def prompt(**given):
        body = {"return_token_ids": True, **({"chat_template_kwargs": given} if given else {})}
        answer = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=2, extra_body=body)
        return tokenizer.decode(answer.prompt_token_ids)

    for given in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        used = {"enable_thinking": False, **given}
        options = {"chat_template": file.read_text(), "tokenize": False, "add_generation_prompt": True}
        assert prompt(**given) == tokenizer.apply_chat_template(QUESTION, **options, **used)
    bodies = {"enable_thinkin": True}, {"messages": []}, "on"
    faults = "never reads it; it reads enable_thinking. ", "rlcore sets this name itself", "has to be an object"
    for given, fault in zip(bodies, faults, strict=True):
        response = server.post("/v1/chat/completions", {"messages": QUESTION, "chat_template_kwargs": given})
        assert fault in error(response, 400, "invalid_value")
        assert response.json()["error"]["param"] == "chat_template_kwargs"


# Errors


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "messages is missing"),
        ({"messages": []}, "at least one"),
        ({"messages": "hello"}, "messages is 'hello'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "tool_calls"),
        ({"messages": QUESTION, "max_tokens": 0}, "max_tokens is 0"),
        ({"messages": QUESTION, "max_tokens": "5"}, "max_tokens is '5'"),
        ({"messages": QUESTION, "n": 1000}, "at most 64"),
        ({"messages": QUESTION, "temperature": -1}, "temperature"),
        ({"messages": QUESTION, "top_p": 2}, "top_p"),
        ({"messages": QUESTION, "top_logprobs": 2}, "sampled token"),
        ({"messages": QUESTION, "stop": [""]}, "stop"),
        ({"messages": QUESTION, "stream": "yes"}, "stream"),
        ({"messages": QUESTION, "tools": [{"name": "f"}]}, "tools[0]"),
        ({"messages": QUESTION, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": QUESTION, "frequency_penalty": 1.0}, "penalties"),
        ({"messages": QUESTION, "logit_bias": {"1": 2}}, "logit_bias"),
    ],
)
def test_a_bad_request_names_its_fault(serving, body, part):
    server = serving()
    content = json.dumps(body).encode()  # httpx writes no lone surrogates
    assert part in error(httpx.post(f"{server.url}/v1/chat/completions", content=content), 400)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "prompt is missing"),
        ({"prompt": ["a", "b"]}, "one at a time"),
        ({"prompt": [10**9]}, "the model has"),
        ({"prompt": "x", "logprobs": 5}, "sampled token"),
        ({"prompt": "x", "echo": True}, "echo"),
    ],
)
def test_a_bad_completion_names_its_fault(serving, body, part):
    assert part in error(serving().post("/v1/completions", body), 400)


def test_bodies_that_are_no_json_and_unknown_paths_get_openai_errors(serving):
    server = serving()
    for content in (b"{", b"[1]", b"\xff\xfe", b"[" * 100_000):
        error(httpx.post(f"{server.url}/v1/chat/completions", content=content), 400, "invalid_json")
    error(server.get("/v1/embeddings"), 404, "not_found")
    error(server.get("/v1/chat/completions"), 405, "method_not_allowed")
    with pytest.raises(openai.NotFoundError):
        server.client().embeddings.create(model="tiny", input="x")


def test_a_long_body_is_refused_before_it_is_read(serving):
    server = serving(body_bytes=1000)
    error(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]}), 413)

    def parts():
        for _ in range(100):
            yield b" " * 100

    error(httpx.post(f"{server.url}/v1/chat/completions", content=parts()), 413, "body_too_large")
    assert server.client().models.list()


def test_prompts_answers_and_turns_have_limits(serving):
    server = serving(limits={"prompt_len": 20, "sampling": {"max_tokens": 12}, "max_turns": 3, "fixed": True})
    session = server.session()
    client = server.client(session)
    with pytest.raises(openai.BadRequestError, match=r"data\.prompt_len=20") as raised:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "1+" * 30}])
    assert raised.value.code == "context_length_exceeded"
    messages = list(QUESTION)
    while (answer := server.post(f"/sessions/{session}/v1/chat/completions", {"messages": messages})).is_success:
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and 5+6="}]
    assert "rollout.response_len=12" in error(answer, 400, "context_length_exceeded")
    (row,) = server.rows(session)
    assert row["stop_reason"] == "length"
    other = server.session()
    answers = [server.post(f"/sessions/{other}/v1/chat/completions", {"messages": QUESTION}) for _ in range(4)]
    assert "env.max_turns" in error(answers[-1], 400, "max_turns_exceeded")
    assert len(server.rows(other)) == 3


def test_a_key_is_needed_where_one_is_set(serving):
    server = serving(key="secret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        error(server.get("/v1/models", headers=headers), 401, "invalid_api_key")
    assert server.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert server.get("/health").status_code == 200


def test_an_answer_that_nobody_awaits_is_aborted_and_leaves_no_row(serving, tiny_engine):
    server = serving()
    session = server.session()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/sessions/{session}/v1/completions",
            json={"prompt": "1+2=", "max_tokens": 100, "n": 64, "temperature": 50.0},
            timeout=0.05,
        )
    until = time.monotonic() + 20
    while tiny_engine.in_flight and time.monotonic() < until:
        time.sleep(0.01)
    assert server.rows(session) == []
    assert server.client(session).chat.completions.create(model="tiny", messages=QUESTION)


def test_a_failing_engine_answers_with_an_error_and_the_next_call_works(serving, tiny_engine, monkeypatch):
    from rlcore.episodes.openai_format import RequestError
    from rlcore.episodes.source import answer_requests

    server = serving()
    step, failures = tiny_engine.step, [MemoryError("no room")]
    monkeypatch.setattr(tiny_engine, "step", lambda: (_ for _ in ()).throw(failures.pop()) if failures else step())
    broken = threading.Event()

    def watch():
        server.thread.join()
        server.calls.fail(RequestError(500, "the engine failed: no room"))
        broken.set()
        answer_requests(tiny_engine, server.calls)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert "no room" in error(server.post("/v1/chat/completions", {"messages": QUESTION}), 500)
    assert broken.wait(10)
    assert server.post("/v1/chat/completions", {"messages": QUESTION}).status_code == 200
    assert isinstance(server.failure, MemoryError)
    server.failure, server.thread = None, watcher


def test_ending_the_server_frees_its_port(serving, tiny_engine):
    server = serving()
    port = int(server.url.rpartition(":")[2])
    server.server.close()
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "rlcore-serve"]


# Many at a time


@pytest.mark.timeout(200)
def test_two_hundred_sessions_at_a_time(serving):
    server = serving()

    async def agent(client, number):
        session = (await client.post("/sessions", json={"seed": number})).json()["session_id"]
        messages = [{"role": "user", "content": f"{number}+1="}]
        for _ in range(2):
            answer = await client.post(
                f"/sessions/{session}/v1/chat/completions", json={"messages": messages, "max_tokens": 6}
            )
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        return (await client.delete(f"/sessions/{session}")).json()["rows"]

    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(agent(client, number) for number in range(200)))

    rows = asyncio.run(main())
    assert [len(each) for each in rows] == [1] * 200
    assert all(sum(row["response_mask"]) >= 2 for (row,) in rows)
    assert server.get("/health").json()["sessions"] == 0
