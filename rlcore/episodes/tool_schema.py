"""Schemas of tools, from typed functions and methods with a Google-style docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlcore.episodes.environment import tool_names
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

    Raises ConfigError as `function_schema` does, and for two functions of one name.
    """
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
