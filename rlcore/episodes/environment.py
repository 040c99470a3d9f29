"""The contract of an environment, and the adapter that turns a user's plain class into uniform calls.

The adapter runs in the environment process. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import Runner

NOT_TOOLS = frozenset({"reset", "step", "on_turn", "score", "get_reward", "close", "prepare_process"})
FLOAT32_MAX = 3.4028234663852886e38
_LONGEST = 2000  # characters of an error's message or of a traceback's tail

Message = dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn.

    `messages`: a string is one user message. `reward` belongs to the turn just taken. `done` ends the episode. `seat`
    is the conversation that has the next turn.
    """

    messages: str | list[Message] | None = None
    reward: float | None = None
    done: bool = False
    seat: int = 0


class EnvironmentFailure(Exception):
    """An episode failed. Environments raise it too: `raise EnvironmentFailure("the database is down")`.

    `cause` is one line; `traceback` is the tail of the environment's own, or empty.
    """

    def __init__(self, cause: str = "", traceback: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.traceback = traceback


class ToolError(Exception):
    """A tool's call failed: the model gets the text as it is, and the call counts as a tool error."""


def tool_names(target: type) -> list[str]:
    """Return the names of a class's tools, in the order of their definition: its public methods but NOT_TOOLS.

    A class with an attribute `tool_schemas`, a list of OpenAI function JSON, has the tools of that list instead.
    """
    if hasattr(target, "tool_schemas"):
        return [schema["function"]["name"] for schema in target.tool_schemas]
    names = dict.fromkeys(name for base in reversed(target.__mro__) for name in vars(base))
    return [name for name in names if not name.startswith("_") and name not in NOT_TOOLS and _is_method(target, name)]


def dispatches(target: type) -> bool:
    """Whether the class's method `call_tool(name, arguments)` gets all calls, in place of the method of their name."""
    return hasattr(target, "tool_schemas") and hasattr(target, "call_tool")


def _is_method(target: type, name: str) -> bool:
    found = inspect.getattr_static(target, name)
    return inspect.isfunction(found) or isinstance(found, (staticmethod, classmethod))


def as_class(target: Any) -> type:
    """Return an environment class: `target` itself, or one whose tools are the function(s) `target`."""
    if inspect.isclass(target):
        return target
    functions = [target] if isinstance(target, FunctionType) else target
    return type("Tools", (), {each.__name__: staticmethod(each) for each in functions})


def describe(error: BaseException) -> tuple[str, str]:
    """Return "TypeName: message", and the tail of the traceback, which begins outside rlcore.episodes if it can."""
    try:
        message = str(error)
    except Exception as broken:  # a user's exception class may have a broken __str__
        message = f"(its __str__ raised {type(broken).__name__})"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    return (type(error).__name__ + (f": {message}" if message else ""))[:_LONGEST], text[-_LONGEST:]


class EpisodeEnvironment:
    """One episode of an environment class.

    Every fault of the user's class raises EnvironmentFailure, with the method's name. Only a tool's exception does
    not: the model sees a ToolError's text, and others as "Error: TypeName: message". A copy of the process that the
    environment forks ends when it returns from the user's code, so that it answers nothing.
    """

    def __init__(self, target: type, config: Any = None) -> None:
        """`config` is given to the class's constructor, if it is not None."""
        self._target = target
        self._arguments = () if config is None else (config,)
        self._tools = frozenset(tool_names(target))
        self._dispatches = dispatches(target)
        self._seats: int = getattr(target, "seats", 1)
        self._object: Any = None
        self._seat = 0
        self._over = False
        self._runner: Runner | None = None
        self._pid = os.getpid()

    def reset(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Begin the episode; return {"prompt": None, text or messages, "seat": number}.

        `row`: columns by name. `random`, and numpy and torch where they are imported, start from the seed.
        """
        _seed(seed)
        self._object = self._call("__init__", self._target, *self._arguments)
        if not hasattr(self._object, "reset"):
            return {"prompt": None, "seat": 0}
        columns = _columns(self._object.reset, row, seed)
        value = self._call("reset", self._object.reset, **columns)
        if not isinstance(value, Observation):
            value = Observation(value)
        if value.done or value.reward is not None or self._done:
            raise EnvironmentFailure("reset ended the episode or gave a reward, but no turn was taken")
        self._seat = self._checked_seat("reset", value.seat)
        prompt = value.messages
        if prompt is not None:
            prompt = _well_formed(prompt) if isinstance(prompt, str) else _messages("reset", prompt)
        return {"prompt": prompt, "seat": self._seat}

    def turn(self, message: Message, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Answer an assistant's message and its tool calls, {"id", "name", "arguments"} or {"error"} each.

        Calls run in order until one ends the episode. Returns "messages", "reward", "done", "seat", "tool_calls",
        "tool_errors", and "scores" (one per seat; None before the end and for an environment without a score).
        """
        if self._over:
            raise EnvironmentFailure("a turn was taken after the episode's end")
        messages: list[Message] = []
        reward, errors, done = None, 0, False
        self._hear(message, calls)
        for call in [] if self._done else calls:
            text, failed = self._answer(call)
            errors += failed
            messages.append(_tool_message(call, _well_formed(text)))
            if self._done:
                break
        used = len(messages)
        if not calls and not self._done and hasattr(self._object, "step"):
            messages, reward, done = self._step(message)
        elif not calls:
            done = True
        self._over = done or self._done
        return {
            "messages": messages,
            "reward": reward,
            "done": self._over,
            "seat": self._seat,
            "tool_calls": used,
            "tool_errors": errors,
            "scores": self._scores() if self._over else None,
        }

    def finish(self, cut: Message | None = None) -> dict[str, Any]:
        """End an episode that the environment has not ended; return {"scores": one per seat, or None}.

        `cut`: the assistant's message that a limit cut off, which `turn` did not get.
        """
        if self._over:
            raise EnvironmentFailure("the episode was finished after its end")
        self._over = True
        if cut is not None:
            self._hear(cut, [])
        return {"scores": self._scores()}

    def close(self) -> None:
        """Call the environment's `close`, and end its event loop."""
        try:
            if hasattr(self._object, "close"):
                self._call("close", self._object.close)
        finally:
            if self._runner is not None:
                self._call("close of the event loop", self._runner.close)

    @property
    def _done(self) -> bool:
        value = getattr(self._object, "done", False)
        return not callable(value) and bool(value)  # a method `done` is a tool

    def _hear(self, message: Message, calls: Sequence[Mapping[str, Any]]) -> None:
        if hasattr(self._object, "on_turn"):
            self._call("on_turn", self._object.on_turn, dict(message), [dict(call) for call in calls])

    def _step(self, message: Message) -> tuple[list[Message], float | None, bool]:
        value = self._call("step", self._object.step, [message])
        if value is None:
            return [], None, True
        if not isinstance(value, Observation):
            value = Observation(value, seat=self._seat)
        if value.messages is None and not value.done and not self._done and self._seats == 1:
            raise EnvironmentFailure("step returned an Observation with neither messages nor done=True")
        self._seat = self._checked_seat("step", value.seat)
        messages = value.messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": _well_formed(messages)}]
        reward = None if value.reward is None else _number("the reward of step", value.reward)
        return _messages("step", [] if messages is None else messages), reward, value.done

    def _answer(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text that answers a call, and whether the call was an error."""
        if "error" in call:
            return str(call["error"]), True
        name = call["name"]
        if name not in self._tools:
            return f"Error: unknown tool {name!r}; the tools are {', '.join(sorted(self._tools)) or 'none'}", True
        result, error = self._call(f"tool {name!r}", self._use, name, call["arguments"])
        if error is not None:
            return error, True
        if isinstance(result, str):
            return result, False
        try:
            return json.dumps(result, ensure_ascii=False, default=_plain), False
        except (TypeError, ValueError) as reason:
            raise EnvironmentFailure(
                f"tool {name!r} returned {_shown(result)}, which is neither text nor JSON: {reason}"
            ) from None

    def _use(self, name: str, arguments: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return a tool's result, or the text that answers a call that failed."""
        try:
            if self._dispatches:
                return self._settle(self._object.call_tool, name, dict(arguments)), None
            return self._settle(getattr(self._object, name), **arguments), None
        except (EnvironmentFailure, MemoryError):
            raise
        except ToolError as error:
            return None, str(error)
        except Exception as error:
            return None, f"Error: {describe(error)[0]}"

    def _scores(self) -> list[float] | None:
        name = next((name for name in ("score", "get_reward") if hasattr(self._object, name)), None)
        if name is None:
            return None
        value = self._call(name, getattr(self._object, name))
        if getattr(value, "ndim", 0) > 0:  # an array or tensor
            value = value.tolist()
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(values) != self._seats:
            raise EnvironmentFailure(f"{name} returned {len(values)} numbers for {self._seats} seats")
        return [_number(name, each) for each in values]

    def _checked_seat(self, what: str, seat: Any) -> int:
        if not isinstance(seat, int) or not 0 <= seat < self._seats:
            raise EnvironmentFailure(f"{what} gave the turn to seat {seat!r}; the seats are 0 to {self._seats - 1}")
        return int(seat)

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the user's code; an exception becomes an EnvironmentFailure that begins with `what`."""
        try:
            return self._settle(function, *arguments, **named)
        except EnvironmentFailure as failure:
            trace = failure.traceback or describe(failure)[1]
            raise EnvironmentFailure(f"{what} failed: {failure}", trace) from failure
        except BaseException as error:  # SystemExit too
            text, trace = describe(error)
            raise EnvironmentFailure(f"{what} raised {text}", trace) from error

    def _settle(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the user's code, and await the result if it is awaitable."""
        try:
            value = function(*arguments, **named)
            if inspect.isawaitable(value):
                if self._runner is None:
                    from asyncio import Runner  # only here: it takes 40 ms

                    self._runner = Runner()
                value = self._runner.run(_wait_for(value))
            return value
        finally:
            if os.getpid() != self._pid:
                os._exit(0)


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch.random" in sys.modules:
        sys.modules["torch.random"].manual_seed(seed)


def _columns(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of `reset`: the columns that its signature names, or all of them, and the seed."""
    parameters = inspect.signature(reset).parameters.values()
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    every = any(each.kind is each.VAR_KEYWORD for each in parameters)
    columns = {name: value for name, value in row.items() if every or name in named}
    if "seed" in named:
        columns["seed"] = seed
    missing = [name for name, each in named.items() if each.default is each.empty and name not in columns]
    if missing:
        raise EnvironmentFailure(f"reset needs the column {missing[0]!r}; the row has {', '.join(sorted(row))}")
    return columns


def _tool_message(call: Mapping[str, Any], text: str) -> Message:
    message = {"role": "tool", "content": text}
    if "name" in call:
        message["name"] = call["name"]
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message


def _messages(what: str, value: Any) -> list[Message]:
    """Return the messages with well-formed text; EnvironmentFailure if they are not messages."""
    if not isinstance(value, (list, tuple)):
        raise EnvironmentFailure(f"{what} returned {_shown(value)}; text, a list of messages or None is needed")
    for each in value:
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise EnvironmentFailure(f"{what} returned {_shown(each)} among its messages; a message has a 'role'")
        if not isinstance(each.get("content"), str) and not (each.get("content") is None and each.get("tool_calls")):
            raise EnvironmentFailure(f"{what} returned the message {_shown(each)}, whose 'content' is not text")
    return [{**each, "content": _well_formed(each["content"])} if each.get("content") else each for each in value]


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes: tools read them from files, and models write them in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _number(what: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):  # float("1") would accept text
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFailure(f"{what} is {_shown(value)}, not a number") from None
    if not abs(number) <= FLOAT32_MAX:  # also false for NaN
        raise EnvironmentFailure(f"{what} is {number}, not a finite 32-bit number")
    return number


def _plain(value: Any) -> Any:
    """Return numpy's and torch's numbers and arrays as Python's, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _shown(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"
