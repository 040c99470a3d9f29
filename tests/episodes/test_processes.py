"""Environment processes: every way to fail, what is left running, concurrency. Real processes throughout."""

import contextlib
import itertools
import json
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import cloudpickle
import pytest

from rlcore.episodes import processes
from rlcore.episodes.child import MOST_REPLY
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.processes import EnvironmentPool, PackedEnvironment, load_from_file, pack
from rlcore.errors import ConfigError, DataError

SAID = {"role": "assistant", "content": "said"}
THIS = sys.modules[__name__]


def call(name, **arguments):
    return {"id": "c1", "name": name, "arguments": arguments}


def open_pool(target, *, processes=1, timeout=20.0, memory_mb=0, by_value=(THIS,), **keep):
    return EnvironmentPool(
        pack("mine", target, by_value=by_value), processes=processes, timeout=timeout, memory_mb=memory_mb, **keep
    )


def answers(pool, number=1, seconds=20.0):
    """Return this many answers by episode."""
    got, until = [], time.monotonic() + seconds
    while len(got) < number:
        assert time.monotonic() < until, f"{len(got)} of {number} answers"
        got += pool.poll(1.0)
    assert len(got) == number
    return dict(got)


def answer(pool):
    return next(iter(answers(pool).values()))


def use(pool, name, **arguments):
    """Return the content of a tool's answer, or the failure."""
    pool.turn("e", SAID, [call(name, **arguments)])
    reply = answer(pool)
    return reply if isinstance(reply, EnvironmentFailure) else reply["messages"][0]["content"]


def begin(pool, **row):
    pool.reset("e", row, 1)
    return answer(pool)


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def descendants(pid):
    """Return the process ids of all descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, more = set(), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


class Tricks:
    """An environment whose tools misbehave."""

    def reset(self, fail="", **rest):
        if fail:
            raise LookupError(fail)
        self.value = 0
        return "go"

    def pid(self):
        """Return the process id."""
        return os.getpid()

    def add(self, amount: int):
        """Add."""
        self.value += amount
        return self.value

    def raise_error(self):
        """Raise."""
        raise ValueError("a mistake")

    def hang(self):
        """Ignore SIGALRM and SIGTERM, and wait."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def count(self):
        """Stay in a C loop that holds the interpreter's lock."""
        return sum(range(10**12))

    def end(self, status: int):
        """End the process."""
        os._exit(status)

    def kill(self):
        """Kill the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        """Raise SystemExit."""
        sys.exit(4)

    def huge(self):
        """Return more than a reply may hold."""
        return "x" * (MOST_REPLY + 1)

    def chatter(self):
        """Write to standard output in every way."""
        print("garbage" * 1000)
        sys.stdout.flush()
        os.write(1, b"\x00" * 100_000)
        return "said"

    def read_input(self):
        """Read standard input."""
        return sys.stdin.read()

    def close_all(self, wait: float):
        """Close every descriptor."""
        os.closerange(0, 1000)
        time.sleep(wait)
        return "closed"

    def scribble(self, number: int, length: int, body: str):
        """Write a frame to every descriptor, the connection too, and do not return."""
        from rlcore.processes.frames import HEADER  # a global of this module is pickled, and this cannot be

        for descriptor in range(3, 30):
            with contextlib.suppress(OSError):
                os.write(descriptor, HEADER.pack(number, length) + body.encode())
        time.sleep(600)

    def fork(self):
        """Return twice."""
        os.fork()
        return os.getpid()

    def allocate(self):
        """Take 4 GiB."""
        return len(bytearray(2**32))

    def start_process(self, new_session: bool, daemon: bool):
        """Start a process and leave it; return its id."""
        command = "sleep 600 & echo $!" if daemon else "echo $$; exec sleep 600"
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=new_session)
        assert process.stdout is not None
        return int(process.stdout.readline())

    def start_thread(self):
        """Start a thread and leave it."""
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return os.getpid()

    def end_later(self):
        """End the process between two calls."""
        threading.Timer(0.05, os._exit, (5,)).start()

    def change_folder(self):
        """Change the process's directory."""
        os.chdir("/")
        return os.getpid()

    def change_variables(self):
        """Change the process's variables."""
        os.environ["MINE"] = "1"
        return os.getpid()

    def look(self):
        """Return the variables."""
        return dict(os.environ)


@pytest.fixture(scope="module")
def shared():
    """One pool of one process for the tests that need no settings of their own."""
    with open_pool(Tricks, timeout=2.0) as pool:
        yield pool


@pytest.fixture
def pool(shared):
    begin(shared)
    yield shared
    if shared.free == 0:
        shared.release("e")


def test_an_episode_from_reset_to_release(pool):
    assert use(pool, "add", amount=2) == "2"
    first = use(pool, "pid")
    assert use(pool, "add", amount=2) == "4"
    pool.turn("e", SAID, [])
    assert answer(pool)["done"]
    assert pool.free == 0
    pool.release("e")
    assert pool.free == 1
    begin(pool)
    assert use(pool, "add", amount=1) == "1", "a new object"
    assert use(pool, "pid") == first, "the same process"
    pool.finish("e")
    assert answer(pool) == {"scores": None}


def test_an_exception_of_a_tool_is_an_answer(pool):
    assert use(pool, "raise_error") == "Error: ValueError: a mistake"
    assert use(pool, "add", amount=1) == "1"


@pytest.mark.parametrize(
    ("tool", "arguments", "cause"),
    [
        ("hang", {}, r"turn \(tool hang\) gave no answer within 2 s"),
        ("count", {}, r"turn \(tool count\) gave no answer within 2 s"),
        ("end", {"status": 0}, r"turn \(tool end\) ended its process with status 0"),
        ("end", {"status": 3}, r"turn \(tool end\) ended its process with status 3"),
        ("kill", {}, r"turn \(tool kill\) ended its process by SIGKILL \(it may have used more memory"),
        ("leave", {}, "tool 'leave' raised SystemExit: 4"),
        ("close_all", {"wait": 0.0}, r"turn \(tool close_all\) closed its connection"),
        ("close_all", {"wait": 600.0}, r"turn \(tool close_all\) closed its connection"),
    ],
)
def test_a_failed_call_fails_its_episode_only(pool, tool, arguments, cause):
    pid = int(use(pool, "pid"))
    failure = use(pool, tool, **arguments)
    assert isinstance(failure, EnvironmentFailure)
    assert re.match(cause, failure.cause), failure.cause
    with pytest.raises(ValueError, match="has failed"):
        pool.turn("e", SAID, [])
    assert pool.free == 0
    if "process" in cause or "closed" in cause or "no answer" in cause:
        wait_until(lambda: not alive(pid))
    pool.release("e")
    begin(pool)
    assert use(pool, "add", amount=1) == "1"


@pytest.mark.parametrize(
    ("number", "length", "body"),
    [
        (99, 47, '{"error": "x", "traceback": "x", "spent": true}'),
        (2, MOST_REPLY + 1, ""),
        (2, 2, "xx"),
        (2, 2, "{}"),
        (2, 2, "[]"),
        (2, 1, "{}"),
    ],
)
def test_a_forged_answer_fails_the_episode(number, length, body):
    with open_pool(Tricks) as pool:
        begin(pool)
        failure = use(pool, "scribble", number=number, length=length, body=body)
        assert failure.cause == "turn (tool scribble) sent no proper answer"


def test_a_huge_answer_fails_the_episode():
    with open_pool(Tricks) as pool:
        begin(pool)
        assert re.match("the answer to turn has 6710.... bytes; the most are 67108864", use(pool, "huge").cause)
        pool.release("e")
        begin(pool)


def test_memory_over_the_limit_fails_the_episode():
    with open_pool(Tricks, memory_mb=1024) as pool:
        begin(pool)
        first = use(pool, "pid")
        failure = use(pool, "allocate")
        assert failure.cause == "tool 'allocate' raised MemoryError"
        pool.release("e")
        begin(pool)
        assert use(pool, "pid") != first, "a process that ran out of memory is replaced"


def test_a_failing_reset_names_its_cause(pool):
    pool.release("e")
    failure = begin(pool, fail="no such level")
    assert failure.cause == "reset raised LookupError: no such level"
    assert "raise LookupError(fail)" in failure.traceback


def test_output_and_input_are_not_the_protocol(capfd):
    with open_pool(Tricks) as pool:
        begin(pool)
        assert use(pool, "chatter") == "said"
        assert use(pool, "read_input") == ""
    assert capfd.readouterr().out == ""


def test_a_process_that_forks_answers_once(pool):
    own = use(pool, "pid")
    assert use(pool, "fork") == own
    assert pool.poll(0.2) == []
    assert use(pool, "pid") == own


def test_a_process_that_ends_between_calls_fails_the_next(pool):
    pid = int(use(pool, "pid"))
    use(pool, "end_later")
    wait_until(lambda: not alive(pid))
    assert pool.poll(0.1) == []
    pool.turn("e", SAID, [call("pid")])
    pool.release("e")
    assert pool.poll(0.1) == [], "a released episode has no answers"

    begin(pool)
    pool.turn("e", SAID, [call("end_later")])
    time.sleep(0.3)
    assert answer(pool)["messages"], "what was sent before the end counts"
    assert use(pool, "add", amount=1).cause == "the environment ended its process with status 5 between two calls"


@pytest.mark.parametrize(
    ("end", "new_session", "daemon"),
    [*itertools.product(["release", "kill"], [False, True], [False, True]), ("hang", True, True)],
)
def test_what_an_episode_started_ends_with_it(pool, new_session, daemon, end):
    started = int(use(pool, "start_process", new_session=new_session, daemon=daemon))
    assert alive(started)
    if end != "release":
        assert isinstance(use(pool, end), EnvironmentFailure)
    pool.release("e")
    wait_until(lambda: pool.poll(0.01) == [] and not alive(started))


@pytest.mark.parametrize("trace", ["start_thread", "change_folder", "change_variables"])
def test_an_episode_that_leaves_traces_ends_its_process(pool, trace):
    changed = use(pool, trace)
    pool.release("e")
    begin(pool)
    assert use(pool, "pid") != changed


class Closing:
    def reset(self, path, fail=False):
        self.path, self.fail = Path(path), fail

    def wait(self, seconds: float):
        """Wait."""
        time.sleep(seconds)

    def close(self):
        self.path.write_text("closed")
        if self.fail:
            raise OSError("the disk is full")


def test_release_closes_the_environment(tmp_path, caplog):
    with open_pool(Closing) as pool, caplog.at_level(logging.WARNING):
        for number, fail in enumerate([False, True, False]):
            begin(pool, path=str(tmp_path / str(number)), fail=fail)
            if number == 2:
                pool.turn("e", SAID, [call("wait", seconds=0.2)])
            pool.release("e")
        wait_until(lambda: pool.poll(0.01) == [] and (tmp_path / "2").exists())
        assert (tmp_path / "1").exists()
    assert "the environment of a released episode: close raised OSError: the disk is full" in caplog.text
    assert caplog.text.count("released episode") == 1


class Prepared:
    """Says how often, and in which process, it was prepared."""

    prepared: ClassVar = []

    @classmethod
    def prepare_process(cls):
        cls.prepared.append(os.getpid())

    def where(self) -> list:
        """Return the processes: those of the preparations, and this one's parent."""
        return [*self.prepared, os.getppid()]


def test_a_class_is_prepared_once_for_all_episodes():
    with open_pool(Prepared, processes=2) as pool:
        for name in "ab":
            pool.reset(name, {}, 1)
        answers(pool, 2)
        for name in "ab":
            pool.turn(name, SAID, [call("where"), call("prepare_process")])
        for reply in answers(pool, 2).values():
            first, second = json.loads(reply["messages"][0]["content"])
            assert first == second
            assert reply["messages"][1]["content"].startswith("Error: unknown tool 'prepare_process'")


def test_closing_the_pool_closes_open_episodes(tmp_path):
    with open_pool(Closing, processes=4) as pool:
        for name in "abcd":
            pool.reset(name, {"path": str(tmp_path / name)}, 0)
        answers(pool, 4)
        for name, seconds in ("b", 0.0), ("c", 0.6), ("d", 600.0):
            pool.turn(name, SAID, [call("wait", seconds=seconds)])
        time.sleep(0.3)  # the answer to b has come, and is not read
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_hanging_close_is_killed():
    class Hangs:
        def close(self):
            time.sleep(600)

    with open_pool(Hangs, timeout=0.3) as pool:
        for _ in range(2):  # the second waits for the process of the first
            begin(pool)
            pool.release("e")
        wait_until(lambda: pool.poll(0.05) == [] and not pool._slots)


def test_nothing_is_left_when_the_pool_closes():
    with open_pool(Tricks, processes=2) as pool:
        server = pool._server._process.pid
        for name in ("e", "f"):
            pool.reset(name, {}, 0)
        answers(pool, 2)
        started = int(use(pool, "start_process", new_session=True, daemon=True))
        family = {server, started, *descendants(server)}
        assert len(family) >= 4
        assert os.getsid(server) == server, "Ctrl-C reaches this session"
        assert len({os.getsid(pid) for pid in family}) >= 4
    assert [pid for pid in family if alive(pid)] == []


def is_environment(pid):
    """Whether a process is a fork server or one of its slots."""
    return b"rlcore.episodes.child" in Path(f"/proc/{pid}/cmdline").read_bytes()


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
import test_processes as tests
pool = tests.open_pool(tests.Tricks, processes=3)
pool.start()
for name in ("e", "f", "g"):
    pool.reset(name, {{}}, 0)
tests.answers(pool, 3)
tests.use(pool, "start_process", new_session=True, daemon=True)
pool.turn("f", tests.SAID, [tests.call("hang")])
pool.turn("g", tests.SAID, [tests.call("count")])
pool.poll(0.3)
{more}
print("ready", flush=True)
time.sleep(600)
"""


def parent_ready(more=""):
    """Start a process that owns a pool with open episodes."""
    script = PARENT.format(folder=str(Path(__file__).parent), more=more)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    return parent


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_parent_is_killed(how):
    with parent_ready() as parent:
        family = descendants(parent.pid)
        assert len(family) >= 5
        parent.send_signal(how)
    wait_until(lambda: not [pid for pid in family if alive(pid)])


def test_nothing_is_left_when_a_copy_of_the_parent_lives_on():
    with parent_ready("import os; copy = os.fork() or time.sleep(20)") as parent:
        family = descendants(parent.pid)
        parent.kill()
        parent.wait()
        (copy,) = [pid for pid in family if b"test_processes" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        wait_until(lambda: [pid for pid in family if alive(pid)] == [copy])
        os.kill(copy, signal.SIGKILL)


def test_a_copy_of_the_parent_that_ends_ends_nothing():
    more = "import os\nif os.fork() == 0:\n    sys.exit()\nos.wait()\ntests.use(pool, 'add', amount=1)"
    with parent_ready(more) as parent:
        parent.kill()


def test_environments_end_when_parent_and_fork_server_are_killed_at_once():
    with parent_ready() as parent:
        environments = [pid for pid in descendants(parent.pid) if is_environment(pid)]
        assert len(environments) == 4
        os.kill(parent.pid, signal.SIGSTOP)  # it must not see the end of the fork server
        os.kill(min(environments), signal.SIGKILL)
        parent.kill()
    wait_until(lambda: not [pid for pid in environments if alive(pid)])


def test_the_death_of_the_fork_server_fails_episodes_and_is_survived():
    with open_pool(Tricks, processes=2) as pool:
        begin(pool)
        pids = [int(use(pool, "pid")), int(use(pool, "start_process", new_session=False, daemon=True))]
        pool.turn("e", SAID, [call("hang")])
        os.kill(pool._server._process.pid, signal.SIGKILL)
        assert "ended with the process that forked it, which ended its process by SIGKILL" in answer(pool).cause
        pool.release("e")
        wait_until(lambda: not [pid for pid in pids if alive(pid)])
        begin(pool)
        assert use(pool, "add", amount=1) == "1"


class Slow:
    async def sleep(self):
        """Wait 200 ms."""
        import asyncio

        await asyncio.sleep(0.2)
        return os.getpid()


def test_many_environments_work_at_a_time():
    with open_pool(Slow, processes=64) as pool:
        for number in range(64):
            pool.reset(str(number), {}, number)
        answers(pool, 64)
        for _ in range(2):  # the first call imports asyncio
            started = time.monotonic()
            for number in range(64):
                pool.turn(str(number), SAID, [call("sleep")])
            pids = {reply["messages"][0]["content"] for reply in answers(pool, 64).values()}
            seconds = time.monotonic() - started
        assert len(pids) == 64
        assert seconds < 2, "12.8 s of waiting"


class Dice:
    letters = frozenset("abcdefgh")

    def reset(self, seed):
        import numpy

        self.rolls = [random.random(), float(numpy.random.rand()), hash("a")]
        return str([*self.rolls, *self.letters])

    def roll(self):
        """Roll."""
        return random.random()


def play_dice(pool, names):
    """Return the transcripts of the episodes with seeds 0, 1, ..., all under way at once."""
    out = {}
    for seed, name in enumerate(names):
        pool.reset(name, {}, seed)
    for name, reply in answers(pool, len(names)).items():
        out[name] = [reply["prompt"]]
        pool.turn(name, SAID, [call("roll"), call("roll")])
    for name, reply in answers(pool, len(names)).items():
        out[name] += [message["content"] for message in reply["messages"]]
        pool.release(name)
    return [out[name] for name in names]


def test_the_same_seed_gives_the_same_episode():
    with open_pool(Dice, processes=8) as pool:
        together = play_dice(pool, [str(number) for number in range(8)])
    assert len({str(each) for each in together}) == 8
    with open_pool(Dice) as pool:
        for seed, expected in enumerate(together):
            pool.reset("e", {}, seed)
            prompt = answer(pool)["prompt"]
            assert [prompt, use(pool, "roll"), use(pool, "roll")] == expected
            pool.release("e")


def test_a_failed_episode_is_played_again_under_its_name(pool):
    for _ in range(3):
        assert isinstance(use(pool, "end", status=1), EnvironmentFailure)
        pool.release("e")
        begin(pool)
    assert use(pool, "add", amount=1) == "1"


def test_large_rows_and_answers_pass(pool):
    pool.release("e")
    begin(pool, text="x" * 2**24)
    assert use(pool, "raise_error") == "Error: ValueError: a mistake"
    text = "y" * 2**22

    class Echo:
        def reset(self, text):
            return text

    with open_pool(Echo) as other:
        assert begin(other, text=text)["prompt"] == text


class Large:
    def reset(self, text, number):
        return text[0] * number


@pytest.mark.parametrize(("given", "returned"), [(1, 2**21), (2**21, 1)])
def test_a_parent_that_comes_late_gets_its_answers(given, returned, monkeypatch):
    monkeypatch.setattr(processes, "_SEND_TIMEOUT", 0.3)
    with open_pool(Large, timeout=0.3) as pool:
        pool.reset("e", {"text": "x" * given, "number": returned}, 0)
        got = []
        while not got:  # it needs many writes or reads
            time.sleep(0.4)
            got = pool.poll(0.0)
        assert got == [("e", {"prompt": "x" * returned, "seat": 0})]


def test_the_thread_that_starts_the_pool_may_end():
    with open_pool(Tricks) as pool:
        pool.close()
        thread = threading.Thread(target=pool.start)
        thread.start()
        thread.join()
        time.sleep(0.1)
        begin(pool)
        assert use(pool, "add", amount=1) == "1"


class BreaksFork:
    """An environment class that replaces os.fork when it is loaded."""

    def __reduce__(self):
        def no_fork():
            raise BlockingIOError(11, "no more processes")

        def load():
            os.fork = no_fork
            return type("Env", (), {})

        return load, ()


def test_a_process_that_cannot_be_forked_fails_the_episode():
    environment = PackedEnvironment("mine", cloudpickle.dumps((BreaksFork(), None)))
    with EnvironmentPool(environment, processes=1, timeout=1, memory_mb=0) as pool:
        assert begin(pool).cause == "reset cannot be forked: Resource temporarily unavailable"


def test_wrong_use_is_an_error(pool):
    with pytest.raises(ValueError, match="'e' has not been released"):
        pool.reset("e", {}, 0)
    with pytest.raises(ValueError, match="all 1 environment processes have an episode"):
        pool.reset("f", {}, 0)
    pool.turn("e", SAID, [call("pid")])
    with pytest.raises(ValueError, match="call under way: turn"):
        pool.finish("e")
    with pytest.raises(KeyError):
        pool.release("f")
    answer(pool)
    pool.release("e")
    with pytest.raises(DataError, match=r"the row of episode 'e' cannot be sent .*: cannot pickle '_thread.lock'"):
        pool.reset("e", {"x": threading.Lock()}, 0)
    assert pool.free == 1


def test_only_basic_variables_pass(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setenv("MY_SERVER", "here")
    with open_pool(Tricks, keep_env=("MY_SERVER",)) as pool:
        begin(pool)
        text = use(pool, "look")
    assert "secret" not in text
    assert '"MY_SERVER": "here"' in text
    assert '"PATH"' in text


# Loading


def load_error(target, match, **settings):
    pool = EnvironmentPool(target, **{"processes": 1, "timeout": 1.0, "memory_mb": 0, **settings})
    with pytest.raises(ConfigError, match=match) as error:
        pool.start()
    pool.close()
    return str(error.value)


class Loads:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return eval, (self.text,)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "1 / 0",
            "'mine' cannot be loaded in its own process: ZeroDivisionError: division by zero\nTraceback",
        ),
        ("__import__('sys').exit(3)", "cannot be loaded in its own process: SystemExit: 3"),
        ("__import__('os')._exit(3)", "ended its process with status 3 while it was loaded"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "ended its process by SIGKILL .* while it was loaded"),
    ],
)
def test_an_environment_that_does_not_load_is_an_error_of_the_config(text, match):
    load_error(PackedEnvironment("mine", pickle.dumps(Loads(text))), match)


def test_imports_come_first_and_memory_is_checked():
    good = pack("mine", Tricks, by_value=(THIS,), imports=("no_such_module",))
    load_error(good, "ModuleNotFoundError: No module named 'no_such_module'")
    small = pack("mine", Tricks, by_value=(THIS,))
    load_error(small, r"it maps \d+ MiB when loaded, and its limit is 3 MiB \(env.memory_mb\)", memory_mb=3)


FILE = '''
from dataclasses import dataclass

@dataclass
class Number:
    value: int

def double(x: int):
    """Double."""
    return Number(2 * x).value

class Env:
    seats = 2

    def __init__(self, config=None):
        self.config = config

    def double(self, x: int):
        """Double."""
        return [double(x), self.config]

TOOLS = [double]
NUMBER = 3
'''


@pytest.mark.parametrize(
    ("name", "config", "text", "seats"),
    [("Env", {"a": 1}, '[4, {"a": 1}]', 2), ("double", None, "4", 1), ("TOOLS", None, "4", 1)],
)
def test_a_file_travels_by_value(tmp_path, name, config, text, seats):
    file = tmp_path / "random.py"  # called like a standard module
    file.write_text(FILE)
    modules, registered = set(sys.modules), cloudpickle.list_registry_pickle_by_value()
    target, module = load_from_file(f"{file}:{name}")
    file.unlink()
    for by_value in ([], [module]):
        environment = pack("mine", target, config, by_value=by_value)
        assert environment.seats == seats
        assert pickle.loads(pickle.dumps(environment)) == environment
        with EnvironmentPool(environment, processes=1, timeout=20, memory_mb=0) as pool:
            begin(pool)
            assert use(pool, "double", x=2) == text
    assert set(sys.modules) == modules
    assert cloudpickle.list_registry_pickle_by_value() == registered


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py:Env", "environment 'nowhere.py:Env': there is no file .*/nowhere.py"),
        ("{}:Enw", r"has no environment 'Enw'; it has Env, Number, TOOLS, double\. Did you mean 'Env'\?"),
        ("{}", "has no environment ''.*FILE.py:ENVIRONMENT"),
        ("{}:NUMBER", r"NUMBER is a int, not an environment\. Write a class"),
    ],
)
def test_what_cannot_be_loaded_from_a_file(tmp_path, reference, message):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=message):
        load_from_file(reference.format(file))


def test_a_broken_file_is_an_error_of_the_config(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import no_such_module")
    with pytest.raises(ConfigError, match="cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"):
        load_from_file(f"{file}:Env")


def test_what_cannot_be_packed():
    def reset():
        pass

    with pytest.raises(ConfigError, match=r"environment 'mine' is a int\. Write a class"):
        pack("mine", 3)
    with pytest.raises(ConfigError, match="its seats are 0; a whole number from 1"):
        pack("mine", type("Env", (), {"seats": 0}))
    for functions, name in ([reset], "reset"), ([lambda: 1], "<lambda>"), ([alive, alive], "alive"):
        with pytest.raises(ConfigError, match=f"a function called '{name}' cannot be a tool"):
            pack("mine", functions)
    with pytest.raises(ConfigError, match="cannot be sent to its processes: TypeError: cannot pickle"):
        pack("mine", type("Env", (), {"lock": threading.Lock()}))
