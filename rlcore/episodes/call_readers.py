"""Readers of a call's name and arguments: as JSON, as JSON arguments, in tags, and as literals of a function call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.episodes.tool_calls import DEEPEST, SHOWN, listed, read_json, skip_white

CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
"""Both as JSON and as Python write them, since templates print either."""
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
BARE = re.compile(r"[^\s,:=(){}\[\]'\"<>]+")
"""A key, a number or a constant without quotes."""
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"', "\n": ""}

JSON_TYPES: Mapping[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}

Parameters = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments, by the tool's name."""


@dataclass(frozen=True)
class Read:
    """A place to read from: `text` from `place`, for the tool `name`; bare text goes on to `limit` at most."""

    text: str
    place: int
    limit: int
    name: str | None
    parameters: Parameters


class Reader(Protocol):
    """Reads a call from behind its opening to behind its closing."""

    def read(self, at: Read) -> tuple[list[Any], int]:
        """Return calls as {"name": ..., "arguments": ...} and the end; raise ValueError with the fault."""
        ...


@dataclass(frozen=True)
class JSONCall:
    """A whole call, or a list of them, as one JSON value, with its keys for name and arguments, then `close`."""

    close: re.Pattern[str]
    name_key: str
    arguments_key: str

    def read(self, at: Read) -> tuple[list[Any], int]:
        """See Reader."""
        value, end = read_json(at.text, at.place)
        if isinstance(value, ValueError):
            raise value
        calls = [self._call(each) for each in listed(value)]
        return calls, _closed(at.text, end, self.close)

    def _call(self, value: Any) -> Any:
        if not isinstance(value, dict) or self.name_key not in value:
            return value
        return {"name": value[self.name_key], "arguments": value.get(self.arguments_key)}


@dataclass(frozen=True)
class JSONArguments:
    """Arguments as a JSON object behind the name and `first`, then `close`."""

    first: re.Pattern[str]
    close: re.Pattern[str]

    def read(self, at: Read) -> tuple[list[Any], int]:
        """See Reader."""
        arguments, end = read_json(at.text, _after_name(at, self.first))
        if isinstance(arguments, ValueError):
            raise arguments
        return [{"name": at.name, "arguments": arguments}], _closed(at.text, end, self.close)


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments as keys and values between tags, without quotes around texts.

    `first` stands before the first key, `assign` between key and value, `between` from a value's end to the next key.
    `close` ends the last value and the call; `empty` ends a call without arguments. A value is JSON, but a text where
    its schema wants a text.
    """

    first: re.Pattern[str]
    assign: re.Pattern[str]
    between: re.Pattern[str]
    close: re.Pattern[str]
    empty: re.Pattern[str]

    def read(self, at: Read) -> tuple[list[Any], int]:
        """See Reader."""
        arguments: dict[str, Any] = {}
        call = {"name": at.name, "arguments": arguments}
        properties = at.parameters.get(at.name or "", {}).get("properties", {})
        if ended := self.empty.match(at.text, at.place, at.limit):
            return [call], ended.end()
        place = _after_name(at, self.first)
        while True:
            assigned = self.assign.search(at.text, place, at.limit)
            key = at.text[place : assigned.start()] if assigned else ""
            if assigned is None or not key or "\n" in key:
                raise ValueError(f"has an argument without its key and {_shown(self.assign)}")
            if key in arguments:
                raise ValueError(f"has the argument {key[:SHOWN]!r} twice")
            following = self.between.search(at.text, assigned.end(), at.limit)
            stop = following.start() if following else at.limit
            closed = self.close.search(at.text, assigned.end(), min(at.limit, stop + 1))
            end = closed or following
            if end is None:
                raise ValueError(f"is not closed with {_shown(self.close)}")
            arguments[key] = _typed(at.text[assigned.end() : end.start()], properties.get(key))
            place = end.end()
            if closed:
                return [call], place


@dataclass(frozen=True)
class LiteralArguments:
    """Arguments as `key=value` or `key:value`, in brackets behind the name, as Python's calls and Gemma's.

    Texts stand in `quote` (a quotation mark: in either kind), `raw` where the template escapes nothing in them. Lists
    and objects are JSON, or the same with such texts and with keys without quotes.
    """

    first: re.Pattern[str]
    bracket: str
    assign: str
    quote: str
    raw: bool
    close: re.Pattern[str]

    def read(self, at: Read) -> tuple[list[Any], int]:
        """See Reader."""
        place = _after_name(at, self.first)
        arguments, place = self._pairs(at.text, place, self.bracket, self.assign, 0)
        return [{"name": at.name, "arguments": arguments}], _closed(at.text, place, self.close)

    def _pairs(self, text: str, place: int, bracket: str, assign: str, depth: int) -> tuple[dict[str, Any], int]:
        pairs: dict[str, Any] = {}
        place = skip_white(text, place)
        while not text.startswith(bracket, place):
            key, place = self._value(text, place, depth) if self._opens_text(text, place) else _bare(text, place)
            place = skip_white(text, place)
            if not text.startswith(assign, place):
                raise ValueError(f"has no {assign} after {str(key)[:SHOWN]!r}")
            if key in pairs:
                raise ValueError(f"has the argument {str(key)[:SHOWN]!r} twice")
            pairs[key], place = self._value(text, skip_white(text, place + 1), depth)
            place = _after_comma(text, place, bracket)
        return pairs, place + 1

    def _value(self, text: str, place: int, depth: int) -> tuple[Any, int]:
        if depth > DEEPEST:
            raise ValueError(f"is nested deeper than {DEEPEST} levels")
        if self._opens_text(text, place):
            return self._text(text, place, depth)
        if text.startswith(("[", "{"), place):
            value, end = read_json(text, place)
            if not isinstance(value, ValueError):
                return value, end
        if text.startswith("{", place):
            return self._pairs(text, place + 1, "}", ":", depth + 1)
        if text.startswith("[", place):
            return self._list(text, place + 1, depth + 1)
        word, end = _bare(text, place)
        if word in CONSTANTS:
            return CONSTANTS[word], end
        if NUMBER.fullmatch(word) and len(word) < SHOWN:
            return json.loads(word), end
        raise ValueError(f"has {word[:SHOWN]!r}, which is neither a text in quotes, a number, a list nor an object")

    def _list(self, text: str, place: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        place = skip_white(text, place)
        while not text.startswith("]", place):
            value, place = self._value(text, place, depth)
            values.append(value)
            place = _after_comma(text, place, "]")
        return values, place + 1

    def _opens_text(self, text: str, place: int) -> bool:
        return text.startswith(self._quotes, place)

    @property
    def _quotes(self) -> tuple[str, ...]:
        return ("'", '"') if len(self.quote) == 1 else (self.quote,)

    def _text(self, text: str, place: int, depth: int) -> tuple[str, int]:
        quote = next(each for each in self._quotes if text.startswith(each, place))
        start = place + len(quote)
        if len(quote) > 1:
            end = text.find(quote, start)
        elif self.raw and depth == 0:
            # Nothing is escaped, so the text ends where the next key or the call's end follows.
            ending = re.compile(rf"{quote}(?=\s*(?:,\s*\w+\s*{self.assign}|{re.escape(self.bracket)}))")
            found = ending.search(text, start)
            end = found.start() if found else -1
        else:
            found = re.compile(rf"(?:[^{quote}\\]|\\.)*+{quote}", re.DOTALL).match(text, start)
            end = found.end() - 1 if found else -1
        if end < 0:
            raise ValueError(f"has a text that is not closed with {quote}")
        inner = text[start:end]
        is_raw = len(quote) > 1 or (self.raw and depth == 0)
        return inner if is_raw else ESCAPE.sub(_unescaped, inner), end + len(quote)


def _unescaped(escape: re.Match[str]) -> str:
    code, byte, character = escape.groups()
    return chr(int(code or byte, 16)) if code or byte else ESCAPED.get(character, escape[0])


def _bare(text: str, place: int) -> tuple[str, int]:
    word = BARE.match(text, place)
    if word is None:
        shown = text[place : place + 20]
        raise ValueError(f"has {shown!r} where a key or a value belongs" if shown else "is not closed")
    return word[0], word.end()


def _after_comma(text: str, place: int, bracket: str) -> int:
    place = skip_white(text, place)
    if text.startswith(",", place):
        return skip_white(text, place + 1)
    if not text.startswith(bracket, place):
        raise ValueError(f"is not closed with {bracket}")
    return place


def _after_name(at: Read, first: re.Pattern[str]) -> int:
    found = first.match(at.text, at.place)
    if found is None:
        raise ValueError(f"has no {_shown(first)} after the name {(at.name or '')[:SHOWN]!r}")
    return found.end()


def _closed(text: str, place: int, close: re.Pattern[str]) -> int:
    found = close.match(text, place)
    if found is None:
        raise ValueError(f"is not closed with {_shown(close)}")
    return found.end()


def _shown(pattern: re.Pattern[str]) -> str:
    """Return the literal text of a pattern that `flexible` made."""
    return re.sub(r"\\(.)", r"\1", re.sub(r"\(\?:\\?\n\)\?|\\s\*|\(\?:.*?\)\?", "", pattern.pattern)).strip()


def _typed(text: str, schema: Any) -> Any:
    """Return the JSON value that a text without quotes stands for; the text where the schema wants a text instead."""
    value = _json_value(text)
    types = _types(schema)
    return text if "string" in types and not types & JSON_TYPES[type(value)] else value


def _json_value(text: str) -> Any:
    """Return the constant, number, list or object that a text is; else the text."""
    stripped = text.strip()
    if stripped in CONSTANTS:
        return CONSTANTS[stripped]
    if NUMBER.fullmatch(stripped) and len(stripped) < SHOWN:
        return json.loads(stripped)
    if stripped.startswith(("[", "{")):
        value, end = read_json(text, 0)
        return text if isinstance(value, ValueError) or text[end:].strip() else value
    return text


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema names; none where it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
    for each in [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]:
        types |= JSON_TYPES.get(type(each), set())
    for each in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        types |= _types(each)
    return types | ({"null"} if schema.get("nullable") is True else set())


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Parameters:
    """Return the arguments' JSON schema of each tool, by name; `tools` are OpenAI function JSON."""
    return {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
