"""The texts of a scripted policy: calls of an environment's tools, bad calls, and plain answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.tool_calls import ToolCall
from rlcore_plugin_testing.report import CheckFailed

Call = Mapping[str, Any]
"""A tool call: {"name": NAME, "arguments": {...}}."""
Script = Callable[[Mapping[str, Any], int], str | Call | Sequence[Call]]
"""Returns the policy's turn number `turn` (from 0) in the episode of a data row: a text, a tool call, or several.

It is called as `script(row, turn)`; a row has its data columns, `uid` and `sample_index`.
"""

MOST_TOOLS = 4
"""Tools that the suite's own script calls in an episode."""


class ScriptWriter:
    """Writes a script's turns as texts, with calls in the tool format of the run."""

    def __init__(self, setup: EpisodeSetup, script: Script | None) -> None:
        self._setup = setup
        self._script = script or self._default

    def text(self, row: Mapping[str, Any], turn: int) -> str:
        """Return a turn's text."""
        said = self._script(row, turn)
        if isinstance(said, str):
            return said
        calls = [said] if isinstance(said, Mapping) else list(said)
        return "\n".join(self._written(dict(call)) for call in calls)

    def _written(self, call: dict[str, Any]) -> str:
        """Return a call in the first known form that the run's tool format reads back."""
        name, arguments = call["name"], call["arguments"]
        value = json.dumps({"name": name, "arguments": arguments})
        forms = (
            f"<tool_call>\n{value}\n</tool_call>",
            json.dumps({"name": name, "parameters": arguments}),
            value,
        )
        for form in forms:
            calls = self._setup.tool_format.parse(form, 0).calls
            if [(each.name, each.arguments) for each in calls if isinstance(each, ToolCall)] == [(name, arguments)]:
                return form
        raise CheckFailed(
            "the suite cannot write a tool call in the tool format of the run; give a script that returns texts"
        )

    def _default(self, row: Mapping[str, Any], turn: int) -> str | Call | list[Call]:
        """Call each tool once, then an unknown one and a broken call at once, then answer with a number."""
        draw = random.Random(f"{row['uid']} {row['sample_index']} {turn}")
        tools = [tool["function"] for tool in self._setup.tools]
        called = min(len(tools), MOST_TOOLS)
        if turn < called:
            tool = tools[(turn + int(row["sample_index"])) % len(tools)]
            return {"name": tool["name"], "arguments": arguments_for(tool["parameters"], draw)}
        if tools and turn == called:
            known = self._written({"name": tools[0]["name"], "arguments": {}})
            return self._written({"name": "no_such_tool", "arguments": {}}) + "\n" + known[: len(known) // 2]
        return f"The answer is {draw.randrange(100)}."


def arguments_for(schema: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return arguments that fit a tool's parameters; half of the optional ones are left out."""
    required = schema.get("required", ())
    properties: Mapping[str, Any] = schema.get("properties", {})
    given = {name: value_for(part, draw) for name, part in properties.items()}
    return {name: value for name, value in given.items() if name in required or draw.random() < 0.5}


def value_for(schema: Mapping[str, Any], draw: random.Random) -> Any:
    """Return a value that fits a JSON schema of the kinds that type hints give. A text is a sum, such as "3 + 4"."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return value_for(schema[several][0], draw)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return arguments_for(schema, draw)
    if kind == "array":
        return [value_for(schema.get("items", {}), draw) for _ in range(draw.randrange(1, 3))]
    plain: dict[str, Any] = {
        "integer": draw.randrange(10),
        "number": draw.randrange(100) / 4,
        "boolean": draw.random() < 0.5,
        "null": None,
    }
    return plain.get(kind, f"{draw.randrange(1, 50)} + {draw.randrange(1, 50)}")
