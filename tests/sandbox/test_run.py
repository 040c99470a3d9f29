"""run_python: what a run gives and how it ends."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rlcore.errors import ConfigError, DataError
from rlcore.sandbox import Limits, run_python


def test_output_and_status(within):
    result = run_python("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)", within=within)
    assert (result.stdout, result.stderr, result.status) == ("out\n", "err\n", 7)
    assert result.cause == "ended with status 7"
    assert not result.ok
    assert not result.timed_out
    assert not result.cut


def test_an_exception_has_the_traceback_of_a_script(within):
    result = run_python("def f():\n    return 1 / 0\n\nf()\n", within=within)
    assert result.status == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('main.py", line 4, in <module>')
    assert "    return 1 / 0" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_it_is_main_with_its_input_and_files(within):
    code = """
import helper, sys
if __name__ == "__main__":
    print(helper.double(int(input())), sys.stdin.read(), open("sub/data.bin", "rb").read(), sys.argv)
"""
    files = {"helper.py": "def double(x): return 2 * x", "sub/data.bin": b"\xff\x00"}
    result = run_python(code, stdin="21\nrest é", files=files, within=within)
    assert result.stdout == "42 rest é b'\\xff\\x00' ['main.py']\n", result


def test_the_standard_library_works(within):
    code = """
import asyncio, collections, csv, dataclasses, datetime, decimal, fractions, hashlib, heapq, itertools, json, math
import multiprocessing, random, re, sqlite3, statistics, string, subprocess, sys, tempfile, threading, typing
import unittest, zlib
async def main(): await asyncio.sleep(0); return 1
assert asyncio.run(main()) == 1
assert subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True).stdout == b"5\\n"
with tempfile.NamedTemporaryFile() as f: f.write(b"x")
print(hashlib.sha256(b"").hexdigest()[:4])
"""
    assert run_python(code, within=within).stdout == "e3b0\n"


def test_only_the_standard_library(within):
    for name in ("numpy", "rlcore", "confine", "child", "pip"):
        assert "ModuleNotFoundError" in run_python(f"import {name}", within=within).stderr, name


@pytest.mark.parametrize("code", ["import os; os.abort()", "import os; os.kill(os.getpid(), 6)"])
def test_a_signal_is_named(code, within):
    result = run_python(code, within=within)
    assert result.status == -6
    assert result.cause == "killed by SIGABRT"


def test_bytes_that_are_not_text_are_replaced(within):
    assert run_python("import sys; sys.stdout.buffer.write(b'a\\xffb')", within=within).stdout == "a�b"


def test_code_that_does_not_compile(within):
    result = run_python("def f(:", within=within)
    assert result.status == 1
    assert result.stderr.splitlines()[-1].startswith("SyntaxError")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "main.py", "a/../../x"])
def test_files_stay_in_the_folder(name, within):
    with pytest.raises(DataError, match="files:"):
        run_python("", files={name: "x"}, within=within)


def test_limits_are_checked():
    with pytest.raises(ConfigError, match=r"Limits: memory_mb is 1; it must be at least 64"):
        Limits(memory_mb=1)


def test_a_killed_caller_leaves_nothing(within, named):
    """The caller is killed by SIGKILL in the middle of a run, and so cannot tidy."""
    mark = f"orphan-{time.monotonic_ns()}"
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(90)", {mark!r}], start_new_session=True)
time.sleep(90)
"""
    caller = f"""
from rlcore.sandbox import Limits, probe, run_python
run_python({code!r}, limits=Limits(seconds=100), within=probe({within.mechanism!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", caller])
    try:
        _wait_for(lambda: named(mark))
    finally:
        process.kill()
        process.wait()
    _wait_for(lambda: not named(mark))


def _wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
