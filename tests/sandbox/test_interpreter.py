"""Interpreter: state from call to call, what is shown, and what ends a session."""

from __future__ import annotations

import os
import threading
import time

import pytest

from rlcore.sandbox import Interpreter, Limits
from rlcore.sandbox.interpreter import _take_reply


@pytest.fixture
def session(within):
    with Interpreter(Limits(seconds=10), within=within) as made:
        yield made


def test_state_is_kept_and_the_last_value_shown(session):
    assert session.execute("import math\nx = 20\ndef f(n):\n    return n + 1").stdout == ""
    result = session.execute("print('hello')\nf(x) * 2")
    assert (result.stdout, result.stderr, result.status, result.cause) == ("hello\n42\n", "", 0, "finished")
    assert session.execute("_").stdout == "42\n"
    assert session.execute("None").stdout == ""
    assert session.execute("'a' 'b'; y = 3").stdout == ""
    assert session.execute("math.floor(2.5), 'é'").stdout == "(2, 'é')\n"
    assert session.execute("").ok


def test_an_exception_is_shown_and_ends_nothing(session):
    session.execute("x = 1\ndef f():\n    return x / 0")
    result = session.execute("x = 2\nf()")
    assert (result.status, result.cause) == (1, "raised ZeroDivisionError: division by zero")
    lines = result.stderr.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "<input 2>", line 2, in <module>']
    assert "    return x / 0" in lines
    assert session.execute("x").stdout == "2\n"
    for code in ("def f(:", "exit()", "raise SystemExit(3)", "raise KeyboardInterrupt", "raise BaseException"):
        result = session.execute(code)
        assert result.status == 1, code
        assert "child.py" not in result.stderr
    assert session.execute("x").stdout == "2\n"


def test_input_is_empty(session):
    assert session.execute("input()").cause == "raised EOFError: EOF when reading a line"


def test_a_time_out_loses_the_state_and_the_next_call_starts_anew(within):
    with Interpreter(Limits(seconds=1), within=within) as session:
        session.execute("x = 1")
        begin = time.monotonic()
        result = session.execute("print('before', flush=True)\nwhile True: pass")
        assert time.monotonic() - begin < 8
        assert result.timed_out
        assert not result.ok
        assert result.stdout == "before\n"
        assert result.cause == "took longer than 1 s; the session's state is lost"
        assert not session.alive
        assert session.execute("x").cause == "raised NameError: name 'x' is not defined"
        assert session.alive


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(0)", "ended with status 0"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
        ("import os; os.closerange(0, 1 << 20)", "ended with"),  # above the limit, too: this process may have many
    ],
)
def test_the_end_of_the_process_is_no_success(code, cause, session):
    result = session.execute(code)
    assert result.status is None
    assert not result.ok
    assert not result.timed_out
    assert result.cause.startswith(cause)
    assert result.cause.endswith("; the session's state is lost")
    assert session.execute("1").stdout == "1\n"


def test_a_process_that_ends_between_calls_is_noticed(session):
    session.execute("import os, threading\nthreading.Timer(0.1, os._exit, [5]).start()")
    time.sleep(1)
    assert session.execute("1").cause == "ended with status 5; the session's state is lost"
    assert session.execute("1").stdout == "1\n"


def test_restart_and_close(session, named):
    session.execute("x = 1")
    session.restart()
    assert session.execute("x").status == 1
    mark = f"session-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import subprocess, sys
p = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(90)", "{mark}"], start_new_session=True)
"""
    assert session.execute(code).ok
    deadline = time.monotonic() + 5
    while not named(mark):
        assert time.monotonic() < deadline
    session.close()
    assert named(mark) == []
    session.close()
    assert not session.alive


def test_limits_hold_in_a_session(within, held):
    held("memory")
    with Interpreter(Limits(seconds=5, memory_mb=200, output_kb=4), within=within) as session:
        assert session.execute("x = bytearray(300 * 2**20)").cause.startswith("raised MemoryError")
        result = session.execute("print('a' * 10_000)")
        assert result.ok
        assert result.cut
        assert result.stdout == "a" * 4096
        assert not session.execute("1").cut
        result = session.execute("while True: print('x' * 1000)")
        assert result.cause == "wrote more than 256 KiB; the session's state is lost"


def test_output_of_each_call_is_its_own(session):
    for number in range(20):
        result = session.execute(f"import sys\nprint('o{number}')\nprint('e{number}', file=sys.stderr)")
        assert (result.stdout, result.stderr) == (f"o{number}\n", f"e{number}\n")


def test_long_code_and_long_output_are_no_hang(session):
    assert session.execute("x = '" + "a" * 3_000_000 + "'\nlen(x)").stdout == "3000000\n"
    assert session.execute("print('b' * 3_000_000)").cut


def test_a_copy_of_the_process_answers_no_request(session):
    assert session.execute("import os\npid = os.fork()").ok
    assert [session.execute(f"{n}").stdout for n in range(5)] == [f"{n}\n" for n in range(5)]


@pytest.mark.parametrize("line", [b"{}", b'{"id": "", "error": ""}', b"[]", b"x" * 100, b"\xff", b'{"id": "x" * 9}'])
def test_a_forged_reply_ends_the_session(line, session):
    """Code that writes to all descriptors reaches the reply's, but cannot know the id of a request to come."""
    code = f"""
import os
for n in range(3, 256):
    try:
        os.write(n, {line!r} + b"\\n")
    except OSError:
        pass
"""
    session.execute(code)
    result = session.execute("raise ValueError")
    assert not result.ok
    assert session.execute("1").stdout == "1\n"


def test_a_reply_needs_its_token():
    class Answered:
        replies = bytearray(b'{"id": "a", "error": "E: x"}\n')

    assert _take_reply(Answered, "a") == "E: x"
    Answered.replies = bytearray(b'{"id": "a", "error": "E: x"}\n')
    assert _take_reply(Answered, "b") is None


def test_many_sessions_at_a_time(within):
    def work(number):
        with Interpreter(Limits(seconds=20), within=within) as session:
            session.execute(f"x = {number}")
            results[number] = session.execute("x * 2").stdout

    results = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{2 * number}\n" for number in range(6)}


def test_the_thread_that_started_a_session_may_end(within):
    session = Interpreter(Limits(seconds=10), within=within)
    try:
        thread = threading.Thread(target=session.execute, args=("x = 1",))
        thread.start()
        thread.join()
        time.sleep(0.3)
        assert session.execute("x").stdout == "1\n"
    finally:
        session.close()


def test_descriptors_are_closed(within):
    before = len(os.listdir("/proc/self/fd"))
    with Interpreter(Limits(seconds=1), within=within) as session:
        session.execute("import os; os._exit(1)")
        session.execute("while True: pass")
        session.execute("1")
    assert len(os.listdir("/proc/self/fd")) == before
