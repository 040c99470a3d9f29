"""env=python: the interpreter of the policy, in environment processes as in a run."""

import os
import time
from dataclasses import replace

import pytest

from rlcore.config import compose
from rlcore.episodes.builtin import Python, PythonConfig
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.processes import EnvironmentPool, pack
from rlcore.episodes.tool_schema import schemas_of
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight
from rlcore.training.trainer import train

CONFIG = PythonConfig(seconds=3.0, output_kb=4)


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(pack("python", Python, CONFIG), processes=2, timeout=60, memory_mb=2048) as opened:
        yield opened


@pytest.fixture
def episode(pool):
    """Return a function that runs code in a new episode: (the answer, whether it is an error)."""
    begin(pool, "e")
    yield lambda code: run(pool, "e", code)
    pool.release("e")


def answer(pool):
    until = time.monotonic() + 60
    while not (found := pool.poll(0.5)):
        assert time.monotonic() < until
    return found[0][1]


def begin(pool, name):
    pool.reset(name, {}, 0)
    assert isinstance(answer(pool), dict)


def run(pool, name, code):
    pool.turn(name, {"role": "assistant", "content": "x"}, [{"id": "c", "name": "python", "arguments": {"code": code}}])
    reply = answer(pool)
    assert not isinstance(reply, EnvironmentFailure), reply
    return reply["messages"][0]["content"], bool(reply["tool_errors"])


def test_the_tool_has_a_schema():
    (schema,) = schemas_of(Python)
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


def test_answers_are_the_output_and_the_value_of_the_last_line(episode):
    assert episode("x = 20") == ("(no output)", False)
    assert episode("print('a')\nx + 1") == ("a\n21", False)
    text, failed = episode("print('before')\n1 / 0")
    assert failed
    assert text.startswith("before\nTraceback (most recent call last):")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert episode("x") == ("20", False), "an exception leaves the state as it was"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('so far', flush=True)\nwhile True: pass",
            "so far\nError: took longer than 3 s; the session's",
        ),
        ("import os; os._exit(0)", "Error: ended with status 0; the session's state is lost"),
        ("import os; os.kill(os.getpid(), 9)", "Error: killed by SIGKILL"),
        ("while True: print('x' * 1000)", "Error: wrote more than 256 KiB; the session's state is lost"),
    ],
)
def test_an_end_of_the_interpreter_is_answered_and_the_next_call_has_a_new_one(episode, code, message):
    episode("x = 1")
    text, failed = episode(code)
    assert failed
    assert message in text
    text, failed = episode("x")
    assert failed
    assert "NameError" in text
    assert episode("2 + 2") == ("4", False)


def test_output_is_limited(episode):
    text, failed = episode("print('x' * 20_000)")
    assert not failed
    assert text == "x" * 4096 + "\n(the output was longer; the rest is left out)"


def test_memory_is_limited(episode):
    text, failed = episode("x = bytearray(800 * 2**20)")
    assert failed
    assert text.endswith("MemoryError")


def test_state_is_kept_within_an_episode_and_never_across(pool):
    for name in "ab":
        begin(pool, name)
    for name in "ab":
        run(pool, name, f"x = {name!r}; open('file', 'w').write(x)")
    for name in "ab":
        assert run(pool, name, "x + open('file').read()") == (repr(name * 2), False)
    for name in "ab":
        pool.release(name)
    begin(pool, "c")
    assert "NameError" in run(pool, "c", "x")[0]
    assert run(pool, "c", "import os; os.listdir()") == ("[]", False)
    pool.release("c")


def test_nothing_is_left_running(pool):
    """Neither after the release of an episode, nor after the end of its process in the middle of a call."""
    forever = "import time\nif not os.fork():\n os.setsid()\n time.sleep(600)\n"
    begin(pool, "a")
    assert "Error" not in run(pool, "a", f"import os\n{forever}")[0]
    slot = pool._episodes["a"].pid
    assert descendants(slot)
    pool.release("a")
    wait_until(lambda: not descendants(slot))
    with EnvironmentPool(
        pack("python", Python, replace(CONFIG, seconds=60.0)), processes=1, timeout=60, memory_mb=0
    ) as own:
        begin(own, "a")
        run(own, "a", "1")
        slot = own._episodes["a"].pid
        started = descendants(slot)
        assert started
        own._timeout = 0.5
        own.turn("a", {"role": "assistant"}, [{"id": "c", "name": "python", "arguments": {"code": "while True: pass"}}])
        assert "0.5 s" in str(answer(own))
        wait_until(lambda: not any(map(alive, [slot, *started])))


def descendants(pid):
    """Return the processes below this one that run."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            parents.setdefault(int(parent), []).append(int(name))
    found = list(parents.get(pid, []))
    for each in found:
        found.extend(parents.get(each, []))
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_time_of_a_call_leaves_the_interpreter_its_own():
    plugins = PluginManager.load()
    config = compose(["algo=grpo", "cluster=in_process", "env=python", "env.timeout=12"], plugins)
    with pytest.raises(ConfigError, match=r"env\.timeout=12 is less than env\.python\.seconds=10 and 5 s to start"):
        preflight(config, plugins)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_run_says_what_is_not_enforced(tmp_path):
    from rlcore.sandbox import isolation

    plugins = PluginManager.load()
    small = ["data.batch_size=2", "algo.group_size=2", "rollout.response_len=20", "trainer.total_steps=1"]
    small += [
        "experiment=quickstart",
        "tracker=none",
        "trainer.eval_every=0",
        "data.max_rows=128",
        "data.eval_size=1",
        "cluster=in_process",
    ]
    train(compose([*small, "env=python", "env.tools=off", f"run.dir={tmp_path / 'run'}"], plugins), plugins)
    log = (tmp_path / "run" / "rlcore.log").read_text()
    for line in isolation().lines():
        assert log.count(line) == 1
