"""The judge, asked over real HTTP: a server in this process whose answers each test chooses."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from rlcore_plugin_judge.config import JudgeConfig
from rlcore_plugin_judge.worker import TEMPLATE as DEFAULT
from rlcore_plugin_judge.worker import JudgeWorker

from rlcore import Config, ConfigError, DataError, DataProto, PluginError, PluginManager, RewardsError
from rlcore.config import ClusterConfig, compose
from rlcore.protocol.glossary import check_fields
from rlcore.roles.plugin_groups import PluginGroups
from rlcore.training.preflight import preflight
from rlcore.workers import ClassWithInitArgs, make_executor

TEMPLATE = "{prompt}|{first}|{second}"


@dataclass
class Endpoint:
    """What the server was asked, and how it answers: `answer(prompt, first, second, nth)` gives text or (status, body).

    `nth` counts how often this question has come, from 0.
    """

    answer: Callable = lambda prompt, first, second, nth: "tie"
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def questions(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = request["messages"][0]["content"]
            with state.lock:
                nth = state.questions.count(question)
                state.requests.append(request)
                state.headers.append(dict(self.headers))
                state.paths.append(self.path)
                state.under_way += 1
                state.most_under_way = max(state.most_under_way, state.under_way)
            answer = state.answer(*question.split("|"), nth)
            with state.lock:
                state.under_way -= 1
            status, body, *more = answer if isinstance(answer, tuple) else (200, reply(answer))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in more:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def handle(self):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has stopped waiting
                super().handle()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield state
        server.shutdown()


def reply(content: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


def by_length(prompt, first, second, nth):
    return "A" if len(first) > len(second) else "B" if len(second) > len(first) else "tie"


@contextlib.contextmanager
def judge_of(settings: JudgeConfig, executor: str = "in_process"):
    """Start a run's judge as `run.group("judge")` does; give its handle."""
    config = Config("", None, cluster=ClusterConfig(executor=executor), sections={"judge": settings})
    plugins = PluginManager.load()
    specs = plugins.workers(config)
    with make_executor(config.cluster) as started:
        groups = {
            name: started.worker_group(started.resource_pool(1), ClassWithInitArgs(spec.worker, *spec.args), name)
            for name, spec in specs.items()
        }
        yield PluginGroups(specs, groups, config).get("judge")


@pytest.fixture
def ask(endpoint, tmp_path):
    """Compare pairs of texts as a run does, and return preferences, errors and the step's metrics."""
    (tmp_path / "question.txt").write_text(TEMPLATE)

    def compare(pairs, **settings):
        plain = {"url": endpoint.url, "model": "m", "template": str(tmp_path / "question.txt"), "both_orders": False}
        plain |= {"max_failures": 1.0}
        with judge_of(JudgeConfig(**{**plain, **settings})) as judge:
            compared = judge.compare(batch([first for first, _ in pairs]), batch([second for _, second in pairs]))
            check_fields(compared)
            return compared["preference"].tolist(), compared["judge_error"].tolist(), judge.end_step()()

    return compare


def batch(responses):
    prompts = [f"p{row}" for row in range(len(responses))]
    return DataProto.from_single_dict({"prompt_text": prompts, "response_text": list(responses)})


PAIRS = [("long one", "short"), ("no", "longer"), ("abc", "xyz")]


def test_preferences_and_what_is_sent(ask, endpoint, monkeypatch):
    endpoint.answer = by_length
    monkeypatch.setenv("JUDGE_KEY", "secret-1")
    preference, error, metrics = ask(PAIRS, api_key_env="JUDGE_KEY", request={"max_tokens": 7}, url=endpoint.url + "/")
    assert preference == [1.0, 0.0, 0.5]
    assert error == [False, False, False]
    assert metrics == {"judge/pairs": 3.0, "judge/errors": 0.0}
    assert sorted(endpoint.questions) == ["p0|long one|short", "p1|no|longer", "p2|abc|xyz"]
    assert set(endpoint.paths) == {"/v1/chat/completions"}
    assert [(request["model"], request["max_tokens"]) for request in endpoint.requests] == [("m", 7)] * 3
    assert {headers["Authorization"] for headers in endpoint.headers} == {"Bearer secret-1"}


def test_without_a_key_none_is_sent_and_the_default_question_holds_the_texts(ask, endpoint):
    endpoint.answer = lambda *_: "tie"
    ask([("{first} {prompt}", "é\ud800")])
    assert endpoint.questions == ["p0|{first} {prompt}|é\ud800"]  # texts are not read as part of the template
    assert "Authorization" not in endpoint.headers[0]
    worker = JudgeWorker(JudgeConfig(), "no place", None)
    assert worker.question("p", "f", "s") == "no place"
    question = JudgeWorker(JudgeConfig(), DEFAULT, None).question("2+2=", "4", "5")
    assert [question.count(f">\n{text}\n</") for text in ("2+2=", "4", "5")] == [1, 1, 1]


def test_equal_texts_are_a_tie_that_nobody_is_asked_about(ask, endpoint):
    endpoint.answer = lambda *_: "A"
    assert ask([("same", "same"), ("a", "b")])[0] == [0.5, 1.0]
    assert endpoint.questions == ["p1|a|b"]
    assert ask([("same", "same")])[:2] == ([0.5], [False])
    assert ask([])[:2] == ([], [])


def test_both_orders_undo_a_bias_for_one_place(ask, endpoint):
    """A judge that always says A has no preference; one that goes by length says so twice; one win and one tie: tie."""
    endpoint.answer = lambda *_: "A"
    assert ask([("a", "b")], both_orders=True)[0] == [0.5]
    assert sorted(endpoint.questions) == ["p0|a|b", "p0|b|a"]
    endpoint.answer = by_length
    assert ask(PAIRS, both_orders=True)[0] == [1.0, 0.0, 0.5]
    endpoint.answer = lambda prompt, first, second, nth: "A" if first == "a" else "tie"
    assert ask([("a", "b")], both_orders=True)[0] == [0.5]
    endpoint.answer = lambda prompt, first, second, nth: "A" if first == "a" else "no idea"
    assert ask([("a", "b")], both_orders=True, on_error="second")[:2] == ([0.0], [True])


@pytest.mark.parametrize("trouble", [(500, b"oops"), (503, b""), (429, b"slow down")])
def test_a_request_is_sent_again_after_a_passing_trouble(ask, endpoint, trouble):
    endpoint.answer = lambda prompt, first, second, nth: trouble if nth == 0 else "B"
    assert ask([("a", "b")], retries=1) == ([0.0], [False], {"judge/pairs": 1.0, "judge/errors": 0.0})
    assert len(endpoint.requests) == 2
    endpoint.requests.clear()
    assert ask([("a", "b")], retries=0)[:2] == ([0.5], [True])


def test_the_pause_that_the_server_asks_for_is_kept(ask, endpoint):
    endpoint.answer = lambda prompt, first, second, nth: (429, b"", ("Retry-After", "1")) if nth == 0 else "A"
    start = time.perf_counter()
    assert ask([("a", "b")], retries=1)[0] == [1.0]
    assert time.perf_counter() - start >= 1


def test_a_refusal_is_not_asked_again(ask, endpoint, caplog):
    endpoint.answer = lambda *_: (401, b"who are you?")
    with caplog.at_level(logging.WARNING, "rlcore"):
        assert ask([("a", "b")], retries=5)[1] == [True]
    assert len(endpoint.requests) == 1
    assert "answered with status 401: 'who are you?'" in caplog.text


@pytest.mark.parametrize(
    ("text", "preference"),
    [
        ("A", 1.0),
        ("b.", 0.0),
        ("First is right.\n\n**Verdict: A**\n", 1.0),
        ("[[B]]", 0.0),
        ("The answer of A is wrong.\nResponse B", 0.0),
        ("I cannot tell them apart.\nTie", 0.5),
    ],
)
def test_answers_that_hold_a_verdict(ask, endpoint, text, preference):
    endpoint.answer = lambda *_: text
    assert ask([("x", "y")])[:2] == ([preference], [False])


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "neither A nor B",
        "A\nbut perhaps not",
        "Apple",
        (200, b"<html>"),
        (200, b"{}"),
        (200, b'{"choices": []}'),
        (200, b'{"choices": [{"message": {"content": null}}]}'),
        (200, b"[" * 100_000),
        (200, b"\xff\xfe\x00"),
        (200, b"not gzip at all", ("Content-Encoding", "gzip")),
        (204, b""),
        (302, b"", ("Location", "/elsewhere")),
    ],
    ids=lambda answer: str(answer)[:30],
)
@pytest.mark.parametrize(("on_error", "default"), [("first", 1.0), ("tie", 0.5)])
def test_nonsense_is_counted_and_gets_the_default(ask, endpoint, answer, on_error, default):
    endpoint.answer = lambda prompt, first, second, nth: answer if prompt == "p1" else "B"
    preference, error, metrics = ask([("a", "b"), ("c", "d")], on_error=on_error, retries=0)
    assert preference == [0.0, default]
    assert error == [False, True]
    assert metrics == {"judge/pairs": 2.0, "judge/errors": 1.0}


def test_a_judge_that_hangs_is_left(ask, endpoint):
    """It is not asked again: who was too slow once would be so again."""
    endpoint.answer = lambda prompt, *_: time.sleep(20) or "A" if prompt == "p0" else "A"
    start = time.perf_counter()
    preference, error, _ = ask([("a", "b"), ("c", "d")], timeout=0.5, retries=5)
    assert time.perf_counter() - start < 10
    assert (preference, error) == ([0.5, 1.0], [True, False])
    assert len(endpoint.requests) == 2


def test_a_server_that_drips_is_left_too(ask):
    """Each byte comes in time, the answer never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(200):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.05)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        start = time.perf_counter()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        assert ask([("a", "b")], url=url, timeout=0.5)[1] == [True]
        assert time.perf_counter() - start < 8
        thread.join(timeout=20)


def test_the_whole_call_is_bounded(ask, endpoint, caplog):
    """The second of ten questions blocks the only place: it and those behind it get the default after 2 s."""
    endpoint.answer = lambda prompt, *_: "A" if prompt == "p0" else time.sleep(20) or "A"
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING, "rlcore"):
        preference, error, metrics = ask([("a", f"b{n}") for n in range(10)], concurrency=1, total_timeout=2.0)
    assert time.perf_counter() - start < 10
    assert (preference, error) == ([1.0] + [0.5] * 9, [False] + [True] * 9)
    assert metrics["judge/errors"] == 9
    assert "no answer within judge.total_timeout = 2 s of the call" in caplog.text
    assert len(endpoint.requests) == 2


def test_no_more_requests_than_allowed_are_under_way(ask, endpoint):
    endpoint.answer = lambda *_: time.sleep(0.1) or "A"
    assert ask([("a", f"b{n}") for n in range(12)], concurrency=3)[0] == [1.0] * 12
    assert endpoint.most_under_way == 3


@pytest.fixture
def nobody():
    """The address of a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}/v1"


def test_a_judge_that_is_down_is_said_loudly_once_a_step(ask, nobody, caplog):
    with caplog.at_level(logging.WARNING, "rlcore"):
        preference, error, metrics = ask([("a", "b"), ("c", "d"), ("e", "e")], url=nobody, retries=1, on_error="first")
    # The third pair is equal and needs no judge.
    assert (preference, error) == ([1.0, 1.0, 0.5], [True, True, False])
    assert metrics == {"judge/pairs": 3.0, "judge/errors": 2.0}
    assert "cannot be reached: ConnectError" in caplog.text
    assert caplog.text.count("decided no pair: it failed on 2 of 3, which count as judge.on_error=first") == 1


def test_a_judge_that_fails_too_often_stops_the_run(ask, endpoint, nobody):
    with pytest.raises(RewardsError, match=r"failed on 2 of 2 pairs of one call, more than judge\.max_failures=0\.9"):
        ask([("a", "b"), ("c", "d")], url=nobody, retries=0, max_failures=0.9)
    endpoint.answer = lambda prompt, *_: "A" if prompt == "p0" else "?"
    with pytest.raises(RewardsError, match=r"failed on 1 of 2 pairs of one call, more than judge\.max_failures=0\.25"):
        ask([("a", "b"), ("c", "d")], max_failures=JudgeConfig.max_failures)
    assert ask([("a", "b"), ("c", "d")], max_failures=0.5)[1] == [False, True]


def test_what_cannot_be_compared(endpoint):
    with judge_of(JudgeConfig(url=endpoint.url, model="m")) as judge:
        with pytest.raises(DataError, match="2 rows cannot be compared with 1"):
            judge.compare(batch(["a", "b"]), batch(["c"]))
        other = DataProto.from_single_dict({"prompt_text": ["another"], "response_text": ["b"]})
        with pytest.raises(DataError, match="prompt_text"):
            judge.compare(batch(["a"]), other)
        assert judge.end_step()() == {}
    with pytest.raises(PluginError, match=r"no worker group 'judge'.*starts no workers with this config: see its keys"):
        judge_of(JudgeConfig()).__enter__()


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_judge_is_asked_from_a_worker_on_ray(endpoint, tmp_path):
    endpoint.answer = by_length
    (tmp_path / "question.txt").write_text(TEMPLATE)
    config = JudgeConfig(url=endpoint.url, model="m", template=str(tmp_path / "question.txt"))
    with judge_of(config, "ray") as judge:
        compared = judge.compare(batch(["long one"]), batch(["short"]))
        assert compared["preference"].equal(torch.tensor([1.0]))
        assert judge.end_step()() == {"judge/pairs": 1.0, "judge/errors": 0.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["judge.model=m"], r"judge\.model = 'm' is not used"),
        (["judge.url=http://h/v1"], r"judge\.url = 'http://h/v1' needs judge\.model"),
        (["judge.url=h:8000/v1", "judge.model=m"], r"judge\.url = 'h:8000/v1' must be an HTTP address"),
        (["judge.url=http://h:port/v1", "judge.model=m"], "must be an HTTP address"),
        (["judge.url='http://me:pw@h/v1'", "judge.model=m"], "holds a name, password or query"),
        (["+judge.request={messages: []}"], "request sets messages, which rlcore sets itself"),
        (["judge.api_key_env=sk-12"], "must be the name of an environment variable, as JUDGE_KEY, not the key"),
        (["judge.api_key_env=NO_SUCH_KEY"], "'NO_SUCH_KEY': that environment variable is not set"),
        (["judge.api_key_env=BROKEN_KEY"], "'BROKEN_KEY': that environment variable holds characters that a key"),
        (["judge.template=/nowhere.txt"], r"judge\.template = '/nowhere.txt' cannot be read: .*No such file"),
        (["judge.template={file}"], r"lacks \{second\}, which stand for the texts"),
        (["judge.timeout=0"], r"judge\.timeout"),
        (["judge.on_error=0.5"], r"judge\.on_error"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message, tmp_path, monkeypatch):
    (tmp_path / "question.txt").write_text("{prompt} {first}")
    monkeypatch.setenv("BROKEN_KEY", "sk-1\n")
    overrides = [override.replace("{file}", str(tmp_path / "question.txt")) for override in overrides]
    sound = [] if any("judge.url" in o or "judge.model" in o for o in overrides) else ["judge.url=http://h/v1"]
    sound += ["judge.model=m"] if sound else []
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message) as caught:
        preflight(compose(["algo=grpo", "cluster=in_process", *sound, *overrides], plugins), plugins)
    assert not any(secret in str(caught.value) for secret in ("sk-1", "me:pw"))
