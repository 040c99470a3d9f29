"""How a process ended, in words."""

import signal

import pytest

from rlcore.processes.ends import how_it_ended, signal_name


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended its process with status 0"),
        (3, "ended its process with status 3"),
        (-signal.SIGSEGV, "ended its process by SIGSEGV"),
        (-signal.SIGKILL, "ended its process by SIGKILL (it may have used more memory than the machine has)"),
        (-40, "ended its process by signal 40"),
    ],
)
def test_a_code_in_words(code, text):
    assert how_it_ended(code) == text


def test_each_signal_has_a_name():
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert all(signal_name(number) for number in range(1, 65))
