from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from rlcore.episodes.tool_calls import ToolCall, check_call
from rlcore.episodes.tool_schema import function_schema, schemas_of, tool_methods
from rlcore.errors import ConfigError


def add(a: int, b: int | None = None, way: Literal["up", "down"] = "up") -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
        way: How to round.

    Returns:
        The sum.
    """
    return a + (b or 0)


class Base:
    limit = 3

    def zero(self) -> str:
        """Give zero."""
        return "0"

    def reset(self, **row: object) -> None: ...
    def step(self, messages: list) -> None: ...
    def score(self) -> float:
        return 0.0

    def get_reward(self) -> float:
        return 0.0

    def close(self) -> None: ...
    def _hidden(self) -> None: ...


class Counter(Base):
    done = False

    def up(self, by: int) -> str:
        """Count up.

        Args:
            by: How many.
        """
        return str(by)

    def zero(self) -> str:
        """Go back to zero."""
        return "0"

    async def ask(self, question: str) -> str:
        """Ask somebody.

        Args:
            question: The question.
        """
        return question

    @staticmethod
    def fixed() -> str:
        """Give five."""
        return "5"

    @classmethod
    def named(cls) -> str:
        """Give the name."""
        return cls.__name__

    @property
    def total(self) -> int:
        return 3


def test_the_schema_of_a_function() -> None:
    assert function_schema(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "nullable": True, "description": "The second number."},
                    "way": {"type": "string", "enum": ["up", "down"], "description": "How to round."},
                },
                "required": ["a"],
            },
        },
    }
    assert check_call(ToolCall("add", {"a": 1, "b": None}, "x"), [function_schema(add)]) is None


def test_the_tools_of_a_class() -> None:
    assert list(tool_methods(Counter)) == ["zero", "up", "ask", "fixed", "named"]
    schemas = schemas_of(Counter)
    assert [schema["function"]["name"] for schema in schemas] == ["zero", "up", "ask", "fixed", "named"]
    assert schemas[0]["function"]["description"] == "Go back to zero."
    assert schemas[1]["function"]["parameters"] == {
        "type": "object",
        "properties": {"by": {"type": "integer", "description": "How many."}},
        "required": ["by"],
    }
    assert schemas[4]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert tool_methods(Counter)["up"](Counter(), 3) == "3"
    assert tool_methods(Counter)["named"]() == "Counter"


def test_a_tool_is_called_by_its_attribute() -> None:
    class Alias:
        plus = staticmethod(add)

    assert [schema["function"]["name"] for schema in schemas_of(Alias)] == ["plus"]


def test_functions() -> None:
    assert schemas_of(add) == schemas_of([add]) == schemas_of((add,)) == [function_schema(add)]
    assert schemas_of(Counter().up) == [function_schema(Counter.up)]
    assert schemas_of([]) == []
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        schemas_of([add, add])


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Give.

    Args:
        a: A number.
    """
    return a


def no_description(a: int) -> int:
    """Give."""
    return a


def unknown_hint(a: Unheard) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Give.

    Args:
        a: A number.
    """
    return a


def odd_hint(a: Callable[[int], int]) -> int:
    """Give.

    Args:
        a: A function.
    """
    return a(1)


def tensor_hint(a: torch.Tensor) -> int:
    """Give.

    Args:
        a: A tensor.
    """
    return len(a)


def open_ended(*a: int) -> int:
    """Give.

    Args:
        a: Numbers.
    """
    return len(a)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (no_docstring, r"tool no_docstring \(.*test_tool_schema\.py\): .*has no docstring! Write its docstring as"),
        (no_hint, "tool no_hint .*Argument a is missing a type hint.*give every argument a type hint"),
        (no_description, "tool no_description .*no description for the argument 'a'"),
        (unknown_hint, "tool unknown_hint .*name 'Unheard' is not defined"),
        (odd_hint, "tool odd_hint .*type hint"),
        (tensor_hint, "tool tensor_hint .*'audio' is not valid.*give every argument a type hint"),
        (open_ended, r"tool open_ended .*cannot fill \*args and \*\*kwargs; name the arguments of 'a'"),
        (lambda a: a, "a tool is a function with a name"),
        (functools.partial(add, 1), "a tool is a function with a name"),
        ("add", "a tool is a function with a name, got 'add'"),
    ],
)
def test_what_a_tool_lacks(function: Any, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        schemas_of([function])


def test_a_class_whose_tool_lacks_a_hint() -> None:
    class Broken:
        def tool(self, a) -> str:  # type: ignore[no-untyped-def]
            """Give.

            Args:
                a: A number.
            """
            return a

    with pytest.raises(ConfigError, match=r"tool .*Broken\.tool .*Argument a is missing a type hint"):
        schemas_of(Broken)


def stated(*schemas, **members):
    return type("Stated", (), {"tool_schemas": list(schemas), **members})


def schema_of(name, **rest):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **rest}}


def test_a_class_can_state_its_schemas():
    """Its methods need no type hints, and those that are not listed are no tools."""
    given = schema_of("add", description="Add.")
    found = stated(given, add=lambda self, a, b: a + b, helper=lambda self: None)
    assert schemas_of(found) == [given]
    dispatched = stated(schema_of("get-time"), schema_of("score"), call_tool=lambda self, name, arguments: name)
    assert [each["function"]["name"] for each in schemas_of(dispatched)] == ["get-time", "score"]


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        (3, r"Stated\.tool_schemas is a int; it must be a list of OpenAI function JSON"),
        ([{"name": "add"}], r"Stated\.tool_schemas holds \{'name': 'add'\}; each entry must be"),
        ([schema_of("")], "each entry must be"),
        ([schema_of("sub")], r"Stated has no method 'sub' that can be a tool; write one, or a method call_tool"),
        ([schema_of("score")], r"Stated has no method 'score' that can be a tool"),
        ([schema_of("add"), schema_of("add")], "two tools are called 'add'"),
        ([schema_of("add", description=3)], "the description of 'add' is not text"),
        ([schema_of("add", parameters={"type": "array"})], "'add' are no JSON schema of an object"),
        ([schema_of("add", parameters={"type": "object", "required": 3})], "'add' are no JSON schema: 3 is not"),
    ],
)
def test_a_broken_statement_is_refused(schemas, message):
    target = type("Stated", (), {"tool_schemas": schemas, "add": lambda self: 0, "score": lambda self: 0.0})
    with pytest.raises(ConfigError, match=message):
        schemas_of(target)
