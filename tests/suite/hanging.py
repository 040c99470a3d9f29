"""Tests that hang, for a session of their own; see test_stacks.py."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest

CHILD = """
import sys, time
from rlcore.stacks import register_stacks
register_stacks()
def hangs_in_the_child():
    print("ready", flush=True)
    time.sleep(600)
hangs_in_the_child()
"""
WITHOUT_HANDLER = "import time; print('ready', flush=True); time.sleep(600)"
started: list[subprocess.Popen[bytes]] = []


def start(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.fixture(scope="module")
def process_of_the_file():
    process = start(WITHOUT_HANDLER)
    yield process
    process.kill()
    process.communicate()


def hangs_in_the_test():
    threading.Event().wait()


@pytest.mark.timeout(2)
def test_hangs(process_of_the_file):
    started.extend([start(CHILD), start(WITHOUT_HANDLER)])
    hangs_in_the_test()


def test_after_a_hang(process_of_the_file):
    for process in started:
        assert process.wait(5) == -9
        process.communicate()
    assert process_of_the_file.poll() is None


@pytest.mark.timeout(0.5)
def test_swallows_its_failure():
    try:
        hangs_in_the_test()
    except BaseException as error:
        raise SystemError("another error") from error


@pytest.fixture
def hangs_at_its_end():
    yield
    hangs_in_the_test()


@pytest.mark.timeout(0.5)
def test_fails(hangs_at_its_end):
    raise AssertionError("before its fixture hangs")


def hang_in_c(library: ctypes.CDLL) -> None:
    lock = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


@pytest.mark.timeout(0.5)
def test_hangs_in_c():
    started.append(start(CHILD))
    hang_in_c(ctypes.CDLL(None))


@pytest.mark.timeout(0.5)
def test_hangs_in_c_with_the_lock_of_the_interpreter():
    hang_in_c(ctypes.PyDLL(None))


def test_last():
    pass
