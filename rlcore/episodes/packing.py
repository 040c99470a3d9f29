"""Environments on their way to their processes: loaded from a file by name, and pickled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from rlcore.episodes.environment import NOT_TOOLS
from rlcore.errors import ConfigError
from rlcore.plugins.local import load_name, pickled_by_value

_HOW = "Write a class with `reset` and tools as methods, or a list of functions with type hints and docstrings."


@dataclass(frozen=True)
class PackedEnvironment:
    """An environment ready to be sent to its processes.

    `data` is the cloudpickle of (class or functions, config): by value if they came from a file, else by their module's
    name. `imports` are modules that the process loads first. `seats` is the number of conversations of an episode.
    """

    name: str
    data: bytes
    imports: tuple[str, ...] = ()
    seats: int = 1


def load_from_file(reference: str) -> tuple[Any, ModuleType]:
    """Load FILE.py:NAME and return the class, function or sequence of functions, and the file's module.

    Raises ConfigError for a file or name that is missing, a file that does not load, and any other kind of object.
    """
    return load_name(reference, "environment", "environment", _is_environment, _HOW)


def pack(
    name: str,
    target: Any,
    config: Any = None,
    *,
    imports: Sequence[str] = (),
    by_value: Sequence[ModuleType] = (),
) -> PackedEnvironment:
    """Pickle an environment class, a function or a sequence of functions, and the config that its constructor gets.

    `by_value`: loaded modules that other processes cannot import by name. The module of `load_from_file` need not be
    among them. Raises ConfigError for any other kind of target, for `seats` below 1, for functions that cannot be
    tools, and for code that cannot be pickled.
    """
    if not _is_environment(target):
        raise ConfigError(f"environment {name!r} is a {type(target).__name__}. {_HOW}")
    seats = getattr(target, "seats", 1) if inspect.isclass(target) else 1
    if not isinstance(seats, int) or seats < 1:
        raise ConfigError(f"environment {name!r}: its seats are {seats!r}; a whole number from 1 is needed")
    if not inspect.isclass(target):
        _check_functions(name, [target] if isinstance(target, FunctionType) else target)
    with pickled_by_value(by_value):
        try:
            data = cloudpickle.dumps((target, config))
        except Exception as error:  # pickling runs code of the objects that it meets
            raise ConfigError(
                f"environment {name!r} cannot be sent to its processes: {type(error).__name__}: {error}. It and the "
                "globals that it uses must be picklable; open files, locks and connections in `reset`."
            ) from error
    return PackedEnvironment(name, data, tuple(imports), seats)


def _is_environment(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, FunctionType) for each in value)
    return inspect.isclass(value) or isinstance(value, FunctionType)


def _check_functions(name: str, functions: Sequence[FunctionType]) -> None:
    names = [function.__name__ for function in functions]
    for each in names:
        if each.startswith("_") or not each.isidentifier() or each in NOT_TOOLS or names.count(each) > 1:
            raise ConfigError(
                f"environment {name!r}: a function called {each!r} cannot be a tool; tools have different names that "
                f"do not begin with _ and are none of {', '.join(sorted(NOT_TOOLS))}"
            )
