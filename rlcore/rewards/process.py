"""A killable process for reward code: time limits, memory limits and crashes end that process, never the run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

from rlcore.processes.ends import how_it_ended, kill_group
from rlcore.processes.frames import FrameBuffer, FrameError
from rlcore.processes.pipe import Pipe
from rlcore.rewards.compose import WeightedReward
from rlcore.sandbox.variables import python_variables

FLOAT32_MAX = 3.4028234663852886e38
_START_TIMEOUT = 120.0  # seconds to start Python and run the imports of one function's file
_AHEAD = 16  # calls in flight: sent before the first of them is answered
_MOST_REPLY = 2**28  # bytes; a longer reply is rejected


class RewardFailure(Exception):
    """A reward function gave no usable score. `cause` is one line; `traceback` is the tail of the function's own.

    `may_pass`: the function may not be at fault, so its call is made once more.
    """

    def __init__(self, cause: str, traceback: str = "", *, may_pass: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.traceback = traceback
        self.may_pass = may_pass


class Score(NamedTuple):
    """A function's score of a row, None where it does not apply; and the response's extracted answer, if asked for."""

    value: float | None
    answer: str | None = None


class RewardProcess:
    """One child process with the functions loaded. It starts when needed, and again after it was killed.

    The child has its own session, so Ctrl-C does not reach it and a kill reaches all processes that it started. It dies
    with its parent. Reward code's output goes to this process's standard error. Not for use by two threads at a time.
    """

    def __init__(self, functions: Sequence[WeightedReward], memory_mb: int) -> None:
        """`functions` are called by their position; `memory_mb` limits the address space in MiB (0: no limit)."""
        self._functions = list(functions)
        self._memory_mb = memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] | None = None
        self._received = FrameBuffer(_MOST_REPLY)
        self._sent = self._answered = 0  # requests of this process

    def start(self) -> None:
        """Start the process, if it is not running, and load the functions; RewardFailure when one cannot be loaded."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(
            # -P: the working directory must not shadow modules; -u: no buffer between the pipe and the child.
            [sys.executable, "-Pu", "-m", "rlcore.rewards.child", str(os.getpid()), str(self._memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=python_variables(),
        )
        self._end = weakref.finalize(self, _kill, self._process)
        self._received, self._sent, self._answered = FrameBuffer(_MOST_REPLY), 0, 0
        for function in self._functions:
            try:
                with self._talking(_START_TIMEOUT) as pipe:
                    self._ask(pipe, ("load", function.data, function.batched, function.imports, function.extract))
                    self._reply(pipe)
            except RewardFailure as failure:
                self.close()
                raise RewardFailure(
                    f"reward {function.name!r} cannot be loaded in its own process: it {failure.cause}",
                    failure.traceback,
                ) from None

    def scores(
        self,
        function: int,
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        timeout: float,
        extracts: bool = False,
    ) -> list[Score | RewardFailure]:
        """Return the function's score of each row, a finite float or None, or the RewardFailure of its call.

        A batched function is called once with all rows and has `timeout` seconds per row in total. Any other function
        is called row by row. A call that raises, hangs, dies or returns anything else fails; later rows are still
        scored. A call that was killed, or raised TimeoutError, is made once more, after all others. `extracts`: the
        scores have the answers that the function's `extract` finds, which runs within the same call.
        """
        rows = len(prompts)
        size = max(rows, 1) if self._functions[function].batched else 1
        calls = [slice(start, start + size) for start in range(0, rows, size)]

        def request(rows: slice) -> tuple[Any, ...]:
            return _request(rows, function, extracts, prompts, responses, answers, columns)

        results = self._answers(calls, request, timeout * size)
        again = [number for number, values in enumerate(results) if _may_pass(values)]
        for number, values in zip(
            again, self._answers([calls[number] for number in again], request, timeout * size), strict=True
        ):
            results[number] = values
        return list(chain.from_iterable(results))

    def _answers(
        self, calls: Sequence[slice], request: Callable[[slice], tuple[Any, ...]], timeout: float
    ) -> list[Sequence[Score | RewardFailure]]:
        """Make the calls, each with some of the rows, and return the scores of each.

        Up to `_AHEAD` calls are in flight, so that the process never waits for the next one. When the process is
        killed, its unanswered calls go to its successor.
        """
        results: list[Sequence[Score | RewardFailure]] = []
        sent = 0
        try:
            for number, call in enumerate(calls):
                size = call.stop - call.start
                try:
                    if self._process is None or self._process.poll() is not None:
                        self.start()
                        sent = number
                    with self._talking(timeout) as pipe:
                        for part in calls[sent : number + _AHEAD]:
                            self._ask(pipe, request(part))
                            sent += 1
                        results.append(self._values(pipe, size))
                except RewardFailure as failure:
                    results.append([failure] * size)
        except BaseException:  # a later call must not read the replies of this one
            self.close()
            raise
        return results

    def close(self) -> None:
        """Kill the process, if there is one, with everything it started."""
        if self._end is not None:
            self._end()
        self._process = None

    @contextlib.contextmanager
    def _talking(self, timeout: float) -> Iterator[Pipe]:
        """Give the process `timeout` seconds; RewardFailure when it hangs (it is then killed) or ends."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        try:
            yield Pipe(process, process.stdin.fileno(), process.stdout.fileno(), self._received, deadline)
        except TimeoutError:
            self.close()
            raise RewardFailure(f"gave no answer within {timeout:g} s") from None
        except EOFError:
            raise self._how_it_ended() from None
        except FrameError:
            self.close()
            raise RewardFailure("sent no proper reply") from None

    def _ask(self, pipe: Pipe, request: tuple[Any, ...]) -> None:
        self._sent += 1
        pipe.send(pickle.dumps(request, protocol=5), self._sent)

    def _values(self, pipe: Pipe, rows: int) -> list[Score]:
        reply = self._reply(pipe)
        values, answers = reply.get("values"), reply.get("extracted", [None] * rows)
        if not _are(values, rows, float) or not _are(answers, rows, str):
            self.close()
            raise RewardFailure("sent no proper reply")
        for value in values:
            if value is not None and not abs(value) <= FLOAT32_MAX:  # also false for NaN
                raise RewardFailure(f"returned {value}, not a finite 32-bit number")
        return [Score(value, answer) for value, answer in zip(values, answers, strict=True)]

    def _reply(self, pipe: Pipe) -> dict[str, Any]:
        """Return the reply to the oldest unanswered request; RewardFailure when it is an error."""
        self._answered += 1
        try:
            number, body = pipe.receive()
            reply = json.loads(body) if number == self._answered else None
        except ValueError:  # not JSON
            reply = None
        if not isinstance(reply, dict):
            self.close()
            raise RewardFailure("sent no proper reply")
        if reply.get("spent"):
            self.close()
        if "error" in reply:
            may_pass = reply.get("may_pass") is True
            raise RewardFailure(str(reply["error"]), str(reply.get("traceback", "")), may_pass=may_pass)
        return reply

    def _how_it_ended(self) -> RewardFailure:
        """Reap the process whose pipe broke and say how it ended."""
        assert self._process is not None
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its pipe without ending
            process.wait(timeout=1.0)
        status = process.returncode
        self.close()
        if status is None:
            return RewardFailure("closed its connection")
        # By a signal: the kernel or a person may have killed it for reasons of their own.
        return RewardFailure(how_it_ended(status), may_pass=status < 0)


def _are(values: Any, rows: int, kind: type) -> TypeGuard[list[Any]]:
    """Whether a reply's values are a list of `rows` values, each of this kind or None."""
    return isinstance(values, list) and len(values) == rows and all(v is None or isinstance(v, kind) for v in values)


def _may_pass(values: Sequence[Score | RewardFailure]) -> bool:
    return any(isinstance(value, RewardFailure) and value.may_pass for value in values)


def _request(
    rows: slice,
    function: int,
    extracts: bool,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[Any, ...]:
    chosen = [list(each[rows]) for each in (prompts, responses, answers)]
    return ("call", function, extracts, *chosen, {name: list(values[rows]) for name, values in columns.items()})


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its session's process group, and reap it."""
    kill_group(process.pid)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
