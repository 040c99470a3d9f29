"""Tool calls in a model's answer: the formats that models write, and checks of calls against the tools' schemas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from rlcore.errors import did_you_mean

DEEPEST = 50
"""Levels of lists and objects that a call's arguments may have."""
SHOWN = 200
"""Characters of a fault that an error repeats."""
DECODER = json.JSONDecoder()
CALL_START = re.compile(r'\s*\[?\s*\{\s*"(?:name|function|tool_calls)"\s*:')
"""JSON that begins so is meant as a call, even if it is cut or wrong."""
WHITE = re.compile(r"\s*")
REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)

Span = tuple[int, int]
Found = tuple[Span, Any]
"""Where a call is in the text, and its JSON value, or a ValueError with what is wrong."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote. `id` is nine letters and digits made of the turn and the call's number in it."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be run: `error` is the text that answers it, `text` what the model wrote."""

    error: str
    text: str
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """An answer's calls in order, and its text without them; reasoning stays in the text."""

    content: str
    calls: list[ToolCall | BadCall]


class ToolFormat(Protocol):
    """How a model writes tool calls; a plugin can bring one."""

    def parse(self, text: str, turn: int = 0, tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """Return the calls in an answer without its end token. Never raises: an unreadable call is a BadCall.

        Reasoning holds no calls: <think>...</think>, and everything before a </think> without <think>. `turn` is the
        answer's number in its episode and goes into the calls' ids. `tools`, OpenAI function JSON, give the types of
        values that a format writes as bare text: 5 is a text where the schema wants one.
        """
        ...

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return text for the system prompt that shows the tools' schemas and how to call them."""
        ...


class HermesFormat:
    """Calls as Hermes and Qwen write them, several a turn: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

    example = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'

    def parse(self, text: str, turn: int = 0, tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """See ToolFormat. A tag that is not closed is a BadCall."""
        opening = "<tool_call>"
        start = _unopened_reasoning(text, opening)
        return turn_of(text, (found for found, _ in _tagged(text, start, opening, "</tool_call>")), self.example, turn)

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """See ToolFormat."""
        return tool_instructions(tools, self.example, "One answer can hold several calls")


class LlamaFormat:
    """Calls as Llama 3 writes them: JSON with "parameters" as the whole answer, or after <|python_tag|>."""

    example = '{"name": NAME, "parameters": {...}}'
    tag = "<|python_tag|>"

    def parse(self, text: str, turn: int = 0, tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """See ToolFormat. Several calls are separated by semicolons; other JSON than a call is content."""
        start = _after_reasoning(text, self.tag if self.tag in text else "")
        tag = text.find(self.tag, start)
        if tag >= 0:
            (_, first), *more = _sequence(text, tag + len(self.tag))
            end = more[0][0][0] if more else len(text)
            return turn_of(text, [((tag, end), first), *more], self.example, turn)
        return turn_of(text, _whole_answer(text, start), self.example, turn)

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """See ToolFormat."""
        return tool_instructions(tools, self.example, "The call is the whole answer")


class JSONFormat:
    """Calls as plain JSON: the whole answer, or fenced blocks; OpenAI's {"tool_calls": [...]} and lists too."""

    example = '{"name": NAME, "arguments": {...}}'

    def parse(self, text: str, turn: int = 0, tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """See ToolFormat. JSON that is not a call, and other fenced blocks, are content."""
        start = _after_reasoning(text, "")
        found = _whole_answer(text, start) or [
            (span, value)
            for (span, value), body in _tagged(text, start, r"```\w*\s", "```")
            if _is_call(value) or (isinstance(value, ValueError) and CALL_START.match(text, body))
        ]
        each_found = ((span, each) for span, value in found for each in listed(value))
        return turn_of(text, each_found, self.example, turn)

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """See ToolFormat."""
        return tool_instructions(tools, self.example, "The call is the whole answer, or a block fenced as ```json")


FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {"hermes": HermesFormat(), "llama": LlamaFormat(), "json": JSONFormat()}
)


def check_call(call: ToolCall, schemas: Sequence[dict[str, Any]]) -> BadCall | None:
    """Return why a call cannot be run (None: it can): an unknown tool, or arguments that its schema does not allow.

    `schemas` are OpenAI function JSON. Arguments that the schema does not name are refused unless it has
    `additionalProperties`.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing import Registry

    parameters = {each["function"]["name"]: each["function"].get("parameters") or {} for each in schemas}
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    if call.name not in parameters:
        hint = did_you_mean(call.name, parameters)
        tools = ", ".join(parameters) or "there are none"
        return BadCall(f"Error: unknown tool {call.name[:SHOWN]!r}.{hint} Tools: {tools}", text, call.id)
    schema = _with_null(parameters[call.name])
    if "properties" in schema or not schema:
        schema = {"additionalProperties": False, **schema}
    # An empty registry, so that no reference in a schema is fetched from the network.
    fault = best_match(Draft202012Validator(schema, registry=Registry()).iter_errors(call.arguments))
    if fault is None:
        return None
    where = "".join(f" {name!r}" for name in fault.absolute_path)
    takes = json.dumps(schema.get("properties", {}), ensure_ascii=False)
    error = f"Error: wrong arguments for {call.name}:{where} {fault.message[:SHOWN]}. It takes {takes}"
    return BadCall(error, text, call.id)


def _with_null(schema: Any) -> Any:
    """Return a schema whose `nullable: true`, which JSON schema does not know, allows null."""
    if isinstance(schema, list):
        return [_with_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    return {"anyOf": [inner, {"type": "null"}]} if inner.get("nullable") is True else inner


# ---- reading ----


def read_json(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value that starts at a place of the text, and its end; a ValueError and `place` for a fault."""
    start = skip_white(text, place)
    if not text.startswith(("{", "["), start):  # before the decoder, whose errors count the lines of the whole text
        return ValueError("is not valid JSON: no { at its start"), place
    try:
        return DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return ValueError(f"is not valid JSON: {error.msg} at character {error.pos - start}"), place
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        return ValueError(f"is not valid JSON: {str(error)[:SHOWN]}"), place


def _tagged(text: str, place: int, opening: str, closing: str) -> Iterator[tuple[Found, int]]:
    """Yield the values between tags, outside of reasoning, each with the place after its opening tag."""
    mark = re.compile(f"(?P<reasoning>{REASONING.pattern})|{opening}", re.DOTALL)
    while opened := mark.search(text, place):
        place = opened.end()
        if opened["reasoning"] is not None:
            continue
        value, end = read_json(text, place)
        # A tag that opens again was not closed; a fence cannot, since its opening and closing look alike.
        reopened = text.find(opening, end) if opening == "<tool_call>" else -1
        limit = reopened if reopened >= 0 else len(text)
        closed = text.find(closing, end, limit)
        if closed < 0:
            stop = after = limit
            fault = f"is not closed with {closing}"
        else:
            stop, after = closed, closed + len(closing)
            fault = "is followed by text" if text[end:stop].strip() else ""
        yield (
            ((opened.start(), after), ValueError(fault) if fault and not isinstance(value, ValueError) else value),
            place,
        )
        place = after


def _sequence(text: str, place: int) -> list[Found]:
    """Return the JSON values that fill the rest of the text, between them white space, commas and semicolons."""
    found: list[Found] = []
    while not found or (place < len(text) and not isinstance(found[-1][1], ValueError)):
        value, end = read_json(text, place)
        end = len(text) if isinstance(value, ValueError) else end
        gap = re.compile(r"[\s;,]*").match(text, end)
        after = gap.end() if gap else end
        found.append(((place, after), value))
        place = after
    return found


def _whole_answer(text: str, place: int) -> list[Found]:
    """Return the calls that fill the rest of the text; none if it is something else than calls."""
    if not text[place:].lstrip().startswith(("{", "[")):
        return []
    found = _sequence(text, place)
    is_wrong = isinstance(found[0][1], ValueError) and CALL_START.match(text, place)
    return found if is_wrong or _is_call(found[0][1]) else []


def listed(value: Any) -> list[Any]:
    """Return the calls of a JSON value: of a list, of OpenAI's `tool_calls`, or the value itself."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    values = value if isinstance(value, list) else [value]
    return [each["function"] if isinstance(each, dict) and "function" in each else each for each in values]


def _is_call(value: Any) -> bool:
    return any(
        isinstance(each, dict) and "name" in each and ("arguments" in each or "parameters" in each)
        for each in listed(value)
    )


def _unopened_reasoning(text: str, opening: str) -> int:
    """Return the end of reasoning that the prompt opened, or 0; a </think> in a call's argument is none."""
    mark = re.search("</?think>", text)
    if mark is None or mark[0] == "<think>":
        return 0
    call = text.find(opening)
    is_argument = 0 <= call < mark.start() and read_json(text, call + len(opening))[1] > mark.start()
    return 0 if is_argument else mark.end()


def _after_reasoning(text: str, opening: str) -> int:
    start = _unopened_reasoning(text, opening)
    reasoning = REASONING.match(text, skip_white(text, start))
    return reasoning.end() if reasoning else start


def skip_white(text: str, place: int) -> int:
    """Return the first place from this one on that holds no white space."""
    white = WHITE.match(text, place)
    return white.end() if white else place


# ---- calls ----


def turn_of(text: str, found: Iterable[Found], example: str, turn: int) -> Turn:
    """Return the turn of an answer in which these calls stand; `example` says in errors how to write one."""
    calls: list[ToolCall | BadCall] = []
    content, place = "", 0
    for (start, end), value in found:
        calls.append(_call(value, text[start:end].strip(), example, f"call{turn:03}{len(calls):02}"))
        content += text[place:start]
        place = end
    return Turn((content + text[place:]).strip(), calls) if calls else Turn(text, [])


def _call(value: Any, text: str, example: str, call_id: str) -> ToolCall | BadCall:
    try:
        name, arguments = _fields(value)
    except ValueError as error:
        return BadCall(f"Error: the tool call {error}. Write {example}", text, call_id)
    return ToolCall(name, arguments, call_id)


def _fields(value: Any) -> tuple[str, dict[str, Any]]:
    """Return a call's name and arguments; raise ValueError for what is missing or cannot be passed on."""
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError('has no text as "name"')
    if isinstance(arguments, str):  # as OpenAI's clients write them
        text = arguments
        arguments, end = read_json(text, 0)
        if isinstance(arguments, ValueError) or text[end:].strip():
            raise ValueError("has arguments that are not a JSON object")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("has arguments that are not a JSON object")
    _check_values([name, arguments], 0)
    return name, arguments


def _check_values(value: Any, depth: int) -> None:
    """Raise ValueError for values that JSON text or UTF-8 cannot hold, and for deep nesting."""
    if depth > DEEPEST:
        raise ValueError(f"is nested deeper than {DEEPEST} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("has a number that is not finite")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("has half of a surrogate pair in a string")
    if isinstance(value, dict | list):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_values(each, depth + 1)


def tool_instructions(tools: Sequence[dict[str, Any]], example: str, note: str) -> str:
    """Return the text that shows the tools' schemas, an example of a call, and a note about it."""
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return f"You can call these tools:\n{shown}\nWrite a call as {example}. {note}; the result is in the next message."
