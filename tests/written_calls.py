"""Calls that a chat template writes, to be read back; the renderings are made here, without rlcore."""

from __future__ import annotations

import json
from typing import Any

import jinja2

from rlcore.episodes.tool_calls import ToolCall

ANSWER = "~the answer~"
USER = {"role": "user", "content": "What is it?"}
ARGUMENTS: list[dict[str, Any]] = [
    {"text": 'a "quoted" word', "lines": "two\nlines\n", "other": "é ☃ 😀", "apostrophe": "it's", "digits": "5"},
    {"empty": "", "word": "true", "list": "[1]", "signs": "a \\ b <b> & {c} [d], e=1"},
    {"number": 2.5, "integer": -1, "yes": True, "no": False, "nothing": None},
    {"list": [1, "x", None, True, []], "object": {"k": "v\n", "deep": {"a": [{"b": "it's"}]}}, "none": {}},
    {},
]
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a tool whose parameters have the types of these arguments."""
    properties = {key: {"type": TYPES.get(type(value), "null")} for key, value in arguments.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


def render(tokenizer: Any, answer: dict[str, Any]) -> str | None:
    """Return the rendering of an answer to a user's message; None where the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template([USER, answer], tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


def written(tokenizer: Any, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return an answer with these calls, without the rest of the conversation, "" where the template writes none."""
    for as_text in (False, True):
        for content in ("", None):
            for ids in ("call0000{1}", "functions.{0}:{1}"):
                given = [
                    {
                        "id": ids.format(name, number),
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
                    }
                    for number, (name, arguments) in enumerate(calls)
                ]
                text = render(tokenizer, {"role": "assistant", "content": content, "tool_calls": given})
                if text is None or calls[0][0] not in text:
                    continue
                head, _, tail = (render(tokenizer, {"role": "assistant", "content": ANSWER}) or "").partition(ANSWER)
                if text.startswith(head):
                    return text.removeprefix(head).removesuffix(tail)
                user = str(tokenizer.apply_chat_template([USER], tokenize=False))
                return text.removeprefix(user)
    return ""


def check_round_trips(tokenizer: Any, tool_format: Any) -> int:
    """Assert that calls are read as they were given, and are the same text when written again; return how many."""
    count = 0
    for arguments in ARGUMENTS:
        one = ("do.it-now", arguments)
        for calls in ([one], [one, ("other_tool", arguments)]):
            text = written(tokenizer, calls)
            if not text:  # the template refuses two
                continue
            expected = [call for call in calls if call[0] in text]  # gpt-oss's writes one of two
            tools = [schema(*call) for call in calls]
            found = tool_format.parse(text, 3, tools).calls
            assert all(isinstance(call, ToolCall) for call in found), (text, found)
            assert [(call.name, call.arguments) for call in found] == expected, text
            assert [call.id for call in found] == [f"call0030{number}" for number in range(len(found))]
            assert written(tokenizer, [(call.name, call.arguments) for call in found]) == text
            count += len(found)
    return count
