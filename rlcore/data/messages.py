"""Messages and tools of a data set's rows, as templates take them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from rlcore.errors import DataError


def plain_prompt(prompt: Any) -> Any:
    """Return a data set's prompt as text or as messages that templates take; anything else as it is.

    A JSON list of messages in a string is read. Keys that are None are left out, as Parquet gives every message the
    keys of all. Parts of a content that are text are joined. Raises DataError for other parts, such as images.
    """
    if isinstance(prompt, str) and prompt.lstrip().startswith("[") and '"role"' in prompt:
        with contextlib.suppress(ValueError):  # a text that begins with a bracket
            read = json.loads(prompt)
            prompt = read if read and all(isinstance(each, dict) and "role" in each for each in read) else prompt
    if not isinstance(prompt, list):
        return prompt
    return [_plain_message(message) if isinstance(message, Mapping) else message for message in prompt]


_TOOLS = "it must be a list of function schemas, or JSON of one. Rename or drop a column that holds something else"


def plain_tools(tools: Any) -> list[Mapping[str, Any]]:
    """Return the tools of a row: function schemas, or such a list as JSON text. Raises DataError for anything else."""
    given = tools
    if isinstance(tools, str):
        try:
            tools = json.loads(tools.strip() or "[]")
        except ValueError as error:
            raise DataError(f"column 'tools' holds {given!r:.200}; {_TOOLS}") from error
    if not isinstance(tools or [], list) or not all(isinstance(tool, Mapping) for tool in tools or []):
        raise DataError(f"column 'tools' holds {given!r:.200}; {_TOOLS}")
    return [_without_none(tool) for tool in tools or []]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: _without_none(value) for key, value in message.items() if value is not None}
    parts = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(parts, list):
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise DataError(f"a message's content has the part {part!r:.200}; only parts with a text are read")
        parts = "\n".join(part["text"] for part in parts)
    return message if parts is None else {**message, "content": parts}  # templates read it without a test


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
