"""Processes that share the rendering and tokenising of a large data set's rows.

As a program, this file is one of them: it reads a function and then parts from stdin, and answers each part.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar, cast

from rlcore.errors import ConfigError, DataError, WorkerError
from rlcore.processes.child import die_with_parent
from rlcore.processes.ends import how_it_ended
from rlcore.processes.frames import frame, read_frame

P = TypeVar("P")
T = TypeVar("T")

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def map_in_processes(count: int, function: Callable[[P], T], parts: Iterable[P]) -> list[T]:
    """Return what a function returns for each part, in order; `count` processes take the parts in turn.

    Function, parts and results travel as pickles between processes of our own. Raises the DataError or ConfigError of
    the first part that has one, and WorkerError where a process ends before its answer.
    """
    idle: SimpleQueue[_Child] = SimpleQueue()

    def call(part: P) -> T:
        child = idle.get()
        try:
            return child.call(part)  # type: ignore[no-any-return]
        finally:
            idle.put(child)

    with ExitStack() as ends:
        for _ in range(count):
            child = _Child(function)
            ends.callback(child.end)
            idle.put(child)
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(call, parts))


class _Child:
    """A running process, and the pipes to it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        command = [sys.executable, "-m", __name__, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ONE_THREAD}
        )
        self._function: Callable[[Any], Any] | None = function

    def call(self, part: Any) -> Any:
        """Return the function's result for a part, or raise its error."""
        sent = [part] if self._function is None else [self._function, part]  # once, and not before all have started
        self._function = None
        stdin, stdout = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        answer = None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer says
            stdin.write(b"".join(frame(pickle.dumps(each)) for each in sent))
            stdin.flush()
            answer = read_frame(stdout)
        if answer is None:
            raise WorkerError(
                f"a process that renders and tokenises prompts ended: {how_it_ended(self._process.wait())}. Start "
                "again with more memory, or fewer rows (data.max_rows)"
            )
        failed, result = pickle.loads(answer[1])
        if failed:
            raise result
        return result

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Answer parts until stdin ends."""
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    function = None
    while (message := read_frame(sys.stdin.buffer)) is not None:
        given = pickle.loads(message[1])
        if function is None:
            function = given
            continue
        try:
            answer = False, function(given)
        except (ConfigError, DataError) as error:
            answer = True, error
        except Exception as error:  # it goes on in the parent, as text: not every error can be pickled
            answer = True, WorkerError(f"rendering and tokenising prompts failed: {type(error).__name__}: {error}")
        answers.write(frame(pickle.dumps(answer)))
        answers.flush()


if __name__ == "__main__":
    main()
