"""Checks of a plugin module and of its specs. Each function returns the fault as a message, or None."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from rlcore.config.build import REQUIRED, check_schema, defaults
from rlcore.config.schema import SECTIONS, Config
from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins import hookspecs
from rlcore.plugins.algorithm import Algorithm
from rlcore.plugins.specs import API_VERSION, PLUGIN_KINDS, AlgorithmSpec, CommandSpec, PluginKind

HOOKS: dict[str, Callable[..., Any]] = {
    name: function for name, function in vars(hookspecs).items() if hasattr(function, "rlcore_spec")
}
"""All hooks by name, in the order of the reference."""


def module_faults(module: object, functions: Mapping[str, Any]) -> list[str]:
    """Return all faults of a plugin module, or of an object; `functions` are its hooks from `hooks_of`."""
    faults = [_hook_fault(*item) for item in functions.items()]
    if isinstance(module, ModuleType):  # an object is of the program that gives it
        faults.insert(0, _api_fault(module))
    if not functions:
        faults.append(f"it implements no hook; mark functions with @hookimpl. Hooks: {', '.join(HOOKS)}")
    return [fault for fault in faults if fault is not None]


def _api_fault(module: ModuleType) -> str | None:
    """Check the stated version of the plugin contract."""
    if not hasattr(module, "RLCORE_API"):
        return f"it does not state its version of the plugin contract; add `RLCORE_API = {API_VERSION}`"
    version = module.RLCORE_API
    if type(version) is not int or version != API_VERSION:
        return (
            f"RLCORE_API = {version!r} is unknown to this rlcore, which has {API_VERSION}; install a matching version"
        )
    return None


def hooks_of(module: object) -> dict[str, Any]:
    """Return the functions of a module, or the methods of an object, that are marked as hooks or named like one."""
    if isinstance(module, ModuleType):
        named = vars(module)
    else:  # a property is no hook, and may raise
        names = [name for name in dir(module) if not isinstance(inspect.getattr_static(module, name), property)]
        named = {name: getattr(module, name) for name in names}
    return {
        name: value
        for name, value in named.items()
        if inspect.isroutine(value) and (name.startswith("rlcore_") or hasattr(value, "rlcore_impl"))
    }


def _hook_fault(name: str, function: Any) -> str | None:
    """Check one function that is marked or named as a hook: name, mark, options and arguments."""
    if name not in HOOKS:
        return f"{name}() is not a hook.{did_you_mean(name, HOOKS)} Hooks: {', '.join(HOOKS)}"
    options = getattr(function, "rlcore_impl", None)
    if options is None:
        return f"{name}() has the name of a hook but is not marked; put @hookimpl (from rlcore) above it"
    if given := [key for key, value in options.items() if value]:
        return f"{name}() has the hook option {', '.join(given)}; rlcore's order of calls is fixed, use plain @hookimpl"
    allowed = inspect.signature(HOOKS[name]).parameters
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return f"{name}() takes {parameter}; a hook names its arguments one by one ({_arguments(allowed)})"
        if argument not in allowed:
            return f"{name}() takes {argument!r}.{did_you_mean(argument, allowed)} Allowed: {_arguments(allowed)}"
        if parameter.default is not inspect.Parameter.empty:
            return f"{name}() gives the argument {argument!r} a default, which would never be replaced; remove it"
    return None


def spec_fault(hook: str, value: Any, expected: type) -> str | None:
    """Check one spec of a registration hook: its class, its name, and an algorithm's or section's config class."""
    if not isinstance(value, expected):
        shown = "nothing" if value is None else f"{type(value).__name__} {value!r}"
        return f"{hook}() returned {shown}; it must return {expected.__name__}, or a list of them"
    name = value.name  # type: ignore[attr-defined]
    allowed, pattern = "letters, digits, '_', '-' and '.'", r"\w[\w.-]*"
    if isinstance(value, CommandSpec):
        allowed, pattern = "words of letters, digits, '_' and '-'", r"\w[\w-]*( \w[\w-]*)*"
    if not isinstance(name, str) or not re.fullmatch(pattern, name, re.ASCII):
        return f"{hook}() gave the name {name!r}; a name is made of {allowed}"
    if isinstance(value, AlgorithmSpec):
        return _algorithm_fault(value)
    kind = next((kind for kind in PLUGIN_KINDS if kind.spec is expected), None)
    if kind is not None and kind.has_sections:
        return _section_fault(value, kind)
    if isinstance(value, CommandSpec) and (value.main is None) == (value.run is None):
        return f"the command {value.name!r} needs one function: main(argv), or run(line) for one that takes a config"
    return None


def _section_fault(spec: Any, kind: PluginKind) -> str | None:
    """Check the config class of an engine or plugin, and that the name of its section is free."""
    cls = spec.config_class
    if cls is None and kind.group is not None:
        return None
    taken: Any = Config if kind.group is None else kind.keys or SECTIONS[kind.group]
    if not spec.name.isidentifier() or spec.name in (*taken.__dataclass_fields__, "experiment"):
        return (
            f"{spec.name!r} cannot name a section of the config: {kind.section(spec.name)} must be an identifier that "
            "is not one of rlcore's own keys; choose another name"
        )
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return f"the config_class of {spec.name!r} is {cls!r}; it must be a frozen dataclass"
    try:
        check_schema(cls)
    except ConfigError as error:
        return str(error)
    if required := [name for name, value in defaults(cls).items() if value == REQUIRED]:
        return f"{cls.__qualname__}.{required[0]} has no default; every key of a section needs one"
    return None


def _algorithm_fault(spec: AlgorithmSpec) -> str | None:
    algorithm = spec.algorithm
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        return f"the algorithm {spec.name!r} is {algorithm!r}; it must be a subclass of rlcore.Algorithm"
    config = getattr(algorithm, "config_class", None)
    if config is None:
        return f"{algorithm.__name__} has no `config_class`; give it a frozen dataclass of its settings"
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        return f"{algorithm.__name__}.config_class is {config!r}; it must be a frozen dataclass"
    try:
        check_schema(config)
    except ConfigError as error:
        return str(error)
    return None


def _arguments(parameters: Iterable[str]) -> str:
    return ", ".join(parameters) or "no arguments"
