"""A model's program in a response, run isolated against tests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcore.errors import DataError
from rlcore.sandbox.interpreter import Interpreter
from rlcore.sandbox.isolation import isolation
from rlcore.sandbox.limits import Limits
from rlcore.sandbox.run import run_python

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_TAGS = ("python", "python3", "py", "")
_SHAPES = 'a string of Python asserts, or a list of {"stdin": TEXT, "stdout": TEXT}'


def passed_tests(
    response: str, answer: Any, limits: Limits | None = None, seconds: float = float("inf")
) -> Iterator[bool]:
    """Yield for each test of the answer whether the response's program passes it.

    `answer` is a string of Python statements with asserts, one test that is run after the program in its module, or a
    list of {"stdin", "stdout"}: the program's output for each input, compared without white space at the ends of lines
    and of the text. `limits` are those of one test. When all tests together have taken `seconds`, the rest fail, unrun,
    if the program exceeded a test's own limit of time before.

    Raises TimeoutError if it did not: then nothing is known of the rest. Raises DataError for any other answer, and for
    asserts that do not compile.
    """
    tests, limits = _checked(answer), limits or Limits()
    program = program_of(response)
    isolation()  # tried once; no test's time
    deadline = time.monotonic() + seconds
    too_slow = False
    for number, test in enumerate(tests):
        left = min(limits.seconds, deadline - time.monotonic())
        if isinstance(test, str):  # the only test, so there is time
            yield _passes_asserts(program, test, replace(limits, seconds=left / 2))  # one half for each of its parts
            continue
        result = None if left < 0.2 else run_python(program, stdin=test["stdin"], limits=replace(limits, seconds=left))
        # A test that was stopped early by the others' time has not failed either.
        if result is not None and (not result.timed_out or left > 0.9 * limits.seconds):
            too_slow |= result.timed_out
            yield result.ok and not result.cut and _stripped(result.stdout) == _stripped(test["stdout"])
        elif too_slow:
            yield False
        else:
            raise TimeoutError(f"only {number} of {len(tests)} tests could be run within {seconds:g} s")


def program_of(response: str) -> str:
    """Return the last fenced block marked as Python, else the last without a mark, else the whole response.

    A block that is not closed goes to the end.
    """
    found = [(tag.lower(), text) for tag, text in _FENCE.findall(response)]
    marked = [text for tag, text in found if tag in _TAGS and tag]
    plain = [text for tag, text in found if not tag]
    return [response, *plain, *marked][-1]


def _passes_asserts(program: str, asserts: str, limits: Limits) -> bool:
    """Run the program, and then the asserts in the same session.

    The process gets the asserts, and the random token that its reply must repeat, only after the program's end: neither
    an exit nor any output of the program is taken for a pass.
    """
    with Interpreter(limits) as session:
        return session.execute(program).ok and session.execute(asserts).ok


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _checked(answer: Any) -> Sequence[str | Mapping[str, str]]:
    """Return the tests of an answer; DataError when it has another form than the two."""
    if isinstance(answer, str):
        try:
            compile(answer, "answer", "exec")
        except (SyntaxError, ValueError) as error:
            raise DataError(
                f"tests of a program: the asserts of the answer are not Python ({error}): {answer[:80]!r}"
            ) from None
        if not answer.strip():
            raise DataError(f"tests of a program: the answer is empty; give {_SHAPES}")
        return [answer]
    if not isinstance(answer, Sequence) or not answer:
        raise DataError(
            f"tests of a program: the answer is {str(answer)[:80]!r} ({type(answer).__name__}); give {_SHAPES}"
        )
    for number, test in enumerate(answer, start=1):
        texts = isinstance(test, Mapping) and all(isinstance(value, str) for value in test.values())
        if not texts or set(test) != {"stdin", "stdout"}:
            raise DataError(f"tests of a program: test {number} of the answer is {str(test)[:80]!r}; give {_SHAPES}")
    return answer
