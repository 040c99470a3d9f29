"""The process that runs reward code: `python -m rlcore.rewards.child PARENT_PID MEMORY_MB`, started by process.py.

It reads request frames (`rlcore.processes.frames`) of the parent's pickle from standard input. It answers each with a
frame of JSON, with the request's number, on its original standard output:

    ("load", function, batched, modules, extract)               -> {}    function, extract: cloudpickle bytes, or None
    ("call", number, extracts, prompts, responses, answers, columns)
        -> {"values": [...]}, and with `extracts` "extracted": [...], texts and None    number: in the order of loading

A reply may instead be {"error": ..., "traceback": ..., "may_pass": ...}. After an out-of-memory error the process ends.
Replies are JSON because the parent must not unpickle bytes from a process that ran model output. Nothing here imports
torch.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from rlcore.processes.child import die_with_parent, forbid_core_files, limit_memory
from rlcore.processes.frames import frame, read_frame
from rlcore.stacks import register_stacks

_LONGEST = 2000  # characters of a message or of a traceback's tail


class _WrongAnswer(Exception):
    """A function returned something other than one number per sample."""


class _Function(NamedTuple):
    call: Callable[..., Any]
    batched: bool
    columns: frozenset[str] | None  # names of the columns it accepts; None for any
    taken: frozenset[str]  # names of its first three parameters, already filled by prompt, response and answer
    extract: Callable[[str], Any] | None


def main() -> None:
    """Serve calls until standard input ends."""
    requests, replies = _take_pipes()
    die_with_parent(int(sys.argv[1]))
    register_stacks()
    forbid_core_files()
    limit_memory(int(sys.argv[2]))
    functions: list[_Function] = []
    for number in itertools.count(1):  # as the parent counts, also where a request does not fit into memory
        try:
            request = read_frame(requests)
            if request is None:
                return
            kind, *arguments = pickle.loads(request[1])
            reply: dict[str, Any] = {}
            if kind == "load":
                functions.append(_load(*arguments))
            else:
                position, extracts, prompts, responses, answers, columns = arguments
                function = functions[position]
                reply["values"] = _values(function, prompts, responses, answers, columns)
                if extracts:
                    reply["extracted"] = _extracted(function, responses)
        except BaseException as error:  # user code's exceptions (SystemExit too) go to the parent
            reply = _failure(error)
        replies.write(frame(json.dumps(reply).encode(), number))
        replies.flush()
        if reply.get("spent"):
            return


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the two pipes away from descriptors 0 and 1, so that output of reward code cannot corrupt the protocol."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _load(data: bytes, batched: bool, modules: tuple[str, ...], extract: bytes | None) -> _Function:
    for module in modules:
        importlib.import_module(module)
    call = pickle.loads(data)
    parameters = list(inspect.signature(call).parameters.values())
    any_column = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return _Function(
        call,
        batched,
        None if any_column else frozenset(parameter.name for parameter in parameters[3:]),
        frozenset(parameter.name for parameter in parameters[:3]),
        None if extract is None else pickle.loads(extract),
    )


def _values(
    function: _Function, prompts: list[str], responses: list[str], answers: list[Any], columns: dict[str, list[Any]]
) -> list[float | None]:
    """Call the function (with lists if it is batched, else with the single row); return its numbers as floats."""
    wanted = {
        name: values
        for name, values in columns.items()
        if name not in function.taken and (function.columns is None or name in function.columns)
    }
    if not function.batched:
        row = {name: values[0] for name, values in wanted.items()}
        return [_number(function.call(prompts[0], responses[0], answers[0], **row))]
    values = function.call(prompts, responses, answers, **wanted)
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise _WrongAnswer(f"returned {_shown(values)}, not a list of {len(prompts)} numbers")
    if len(values) != len(prompts):
        raise _WrongAnswer(f"returned {len(values)} values for {len(prompts)} samples")
    return [_number(value) for value in values]


def _extracted(function: _Function, responses: list[str]) -> list[str | None]:
    """Return the final answer of each response; None where the function finds none."""
    assert function.extract is not None
    texts = [function.extract(response) for response in responses]
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise _WrongAnswer(f"extracted {_shown(text)}, neither text nor None")
    return texts


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)):  # float("1") would accept text, which is the function's mistake
        raise _WrongAnswer(f"returned {_shown(value)}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _WrongAnswer(f"returned {_shown(value)}, not a number") from error


def _shown(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


def _failure(error: BaseException) -> dict[str, Any]:
    """Describe an exception; its traceback begins with the first frame outside this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    if isinstance(error, _WrongAnswer):
        return {"error": str(error), "traceback": ""}
    text = "".join(traceback.format_exception(type(error), error, frames))
    return {
        "error": f"raised {type(error).__name__}: {error}"[:_LONGEST],
        "traceback": text[-_LONGEST:],
        "spent": isinstance(error, MemoryError),
        "may_pass": isinstance(error, TimeoutError),
    }


if __name__ == "__main__":
    main()
