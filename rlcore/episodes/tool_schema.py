"""Schemas of tools, from typed functions and methods with a Google-style docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlcore.episodes.environment import NOT_TOOLS, dispatches, tool_names
from rlcore.errors import ConfigError

EXAMPLE = '"""What it does.\\n\\nArgs:\\n    name: What the argument is.\\n"""'

TYPES = "give every argument a type hint of int, float, str, bool, list, dict, Literal or a union of them"


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's or method's OpenAI function JSON: its name, description and parameters (JSON schema).

    Raises ConfigError, naming the function and its file, for a missing or unknown type hint, a missing docstring or
    description of an argument, and for `*args` and `**kwargs`.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if not inspect.isroutine(function) or function.__name__ == "<lambda>":
        raise ConfigError(f"a tool is a function with a name, got {function!r:.200}; write it with `def`")
    code = inspect.unwrap(function)
    where = f"tool {function.__qualname__} ({getattr(inspect.getmodule(code), '__file__', None) or 'no file'})"
    try:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise ConfigError(f"{where}: the model cannot fill *args and **kwargs; name the arguments of {name!r}")
        schema = get_json_schema(function)
    except DocstringParsingException as error:
        raise ConfigError(f"{where}: {error} Write its docstring as {EXAMPLE}") from error
    except (TypeHintParsingException, NameError, TypeError, ValueError) as error:
        shown = " ".join(map(str, error.args))
        raise ConfigError(f"{where}: {shown}; {TYPES}") from error
    try:
        Draft202012Validator.check_schema(schema["function"]["parameters"])
    except SchemaError as error:  # the types of images and tensors, which a model cannot write
        raise ConfigError(f"{where}: {error.message}; {TYPES}") from error
    schema["function"].pop("return", None)  # the model is shown what to write, not what it gets
    return schema


def tool_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return a class's tools by name, base classes' first, in the order of their definition.

    Tools are all public methods but those of NOT_TOOLS (`reset`, `step`, ...); static, class and asynchronous methods
    too, properties not.
    """
    return {name: getattr(cls, name) for name in tool_names(cls)}


def schemas_of(tools: type | Callable[..., Any] | Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schemas of an environment class's tools, of one function, or of a list or tuple of functions.

    A class with an attribute `tool_schemas` states them itself: a list of OpenAI function JSON, in place of type hints.
    Calls go to the methods of those names, or all to `call_tool(name, arguments)` if the class has that method; the
    names may then be any.

    Raises ConfigError as `function_schema` does, for two functions of one name, and for a broken `tool_schemas`.
    """
    if isinstance(tools, type) and hasattr(tools, "tool_schemas"):
        return given_schemas(tools.tool_schemas, f"{tools.__name__}.tool_schemas", None if dispatches(tools) else tools)
    if isinstance(tools, type):
        schemas = [function_schema(method) for method in tool_methods(tools).values()]
        for name, schema in zip(tool_methods(tools), schemas, strict=True):
            schema["function"]["name"] = name  # the attribute's, which calls go by; a function's may differ
        return schemas
    functions: Sequence[Any] = tools if isinstance(tools, list | tuple) else [tools]
    schemas = [function_schema(each) for each in functions]
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two tools are called {twice[0]!r}; each tool needs a name of its own")
    return schemas


def given_schemas(schemas: Any, where: str, methods_of: type | None = None) -> list[dict[str, Any]]:
    """Return schemas that were written by hand or come from elsewhere; ConfigError, with `where`, for broken ones.

    Each is OpenAI function JSON whose parameters are the JSON schema of an object. `methods_of`: a class that needs a
    method of each name.
    """
    if not isinstance(schemas, list | tuple):
        raise ConfigError(f"{where} is a {type(schemas).__name__}; it must be a list of OpenAI function JSON")
    names = []
    for schema in schemas:
        name = _checked_name(schema, where)
        if name in names:
            raise ConfigError(f"{where}: two tools are called {name!r}; each tool needs a name of its own")
        names.append(name)
        if methods_of is None:
            continue
        if name in NOT_TOOLS or name.startswith("_") or not callable(getattr(methods_of, name, None)):
            raise ConfigError(
                f"{where}: {methods_of.__name__} has no method {name!r} that can be a tool; write one, or a method "
                "call_tool(name, arguments) for all of them"
            )
    return [dict(schema) for schema in schemas]


def _checked_name(schema: Any, where: str) -> str:
    """Return the name in a schema; ConfigError if it is not OpenAI function JSON."""
    from jsonschema import Draft202012Validator, SchemaError

    function = schema.get("function") if isinstance(schema, dict) and schema.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        form = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
        raise ConfigError(f"{where} holds {schema!r:.200}; each entry must be {form}")
    if not isinstance(function.get("description", ""), str):
        raise ConfigError(f"{where}: the description of {name!r} is not text")
    parameters = function.get("parameters", {"type": "object"})
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        raise ConfigError(f"{where}: the parameters of {name!r} are no JSON schema of an object: {parameters!r:.200}")
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ConfigError(f"{where}: the parameters of {name!r} are no JSON schema: {error.message}") from error
    return name
