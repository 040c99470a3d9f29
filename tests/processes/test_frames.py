"""Messages between a process and its parent."""

import io
import os
import subprocess
import sys
import time

import pytest

from rlcore.processes.frames import FrameBuffer, FrameError, frame, read_frame
from rlcore.processes.pipe import Pipe

# A process that sends what it reads from standard input, byte by byte, with pauses.
SLOW = "import sys, time\nfor byte in sys.stdin.buffer.read():\n    sys.stdout.buffer.write(bytes([byte]))\n"
SLOW += "    sys.stdout.flush(); time.sleep(float(sys.argv[1]))"


def test_a_frame_is_number_length_and_body():
    assert frame(b"abc", 258) == bytes([0, 0, 0, 0, 0, 0, 1, 2]) + bytes([0, 0, 0, 0, 0, 0, 0, 3]) + b"abc"
    stream = io.BytesIO(frame(b"abc", 1) + frame(b"") + b"\0\0")
    assert [read_frame(stream) for _ in range(3)] == [(1, b"abc"), (0, b""), None]


@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_buffer_gives_whole_frames_however_the_bytes_come(size):
    data = frame(b"x" * 40, 1) + frame(b"", 2) + frame(b"y" * 3, 3)
    buffer, taken = FrameBuffer(max_bytes=40), []
    for start in range(0, len(data), size):
        buffer.add(data[start : start + size])
        while (message := buffer.take()) is not None:
            taken.append(message)
    assert taken == [(1, b"x" * 40), (2, b""), (3, b"yyy")]
    assert not buffer


def test_a_long_frame_is_refused_by_its_header():
    buffer = FrameBuffer(max_bytes=40)
    buffer.add(frame(b"x" * 41)[:16])
    with pytest.raises(FrameError, match=r"a message of 41 bytes; the most are 40"):
        buffer.take()


def test_a_buffer_holds_no_more_than_two_frames():
    buffer = FrameBuffer(max_bytes=40)
    buffer.add(bytes(112))
    with pytest.raises(FrameError, match=r"113 bytes came; the most in a message are 40"):
        buffer.add(b"x")


@pytest.fixture
def speaks():
    """Return a function that starts SLOW with bytes and a pause, and gives a pipe with a deadline in seconds."""
    started = []

    def start(data, pause, seconds):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(pause)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        started.append(process)
        process.stdin.write(data)
        process.stdin.close()
        unused = os.open(os.devnull, os.O_WRONLY)
        started.append(unused)
        return Pipe(process, unused, process.stdout.fileno(), FrameBuffer(2**20), time.monotonic() + seconds)

    yield start
    for each in started:
        if isinstance(each, int):
            os.close(each)
        else:
            each.kill()
            each.wait()
            each.stdout.close()


def test_a_pipe_waits_for_a_whole_frame(speaks):
    assert speaks(frame(b"answer", 7), 0.01, 50).receive() == (7, b"answer")


def test_the_end_of_the_process_is_the_end_of_the_pipe(speaks):
    with pytest.raises(EOFError):
        speaks(frame(b"answer")[:-1], 0, 50).receive()


def test_a_process_that_sends_a_byte_now_and_then_has_no_more_time(speaks):
    pipe = speaks(frame(b"x" * 10_000), 0.05, 0.5)
    with pytest.raises(TimeoutError):
        pipe.receive()
