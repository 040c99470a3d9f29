"""An entry of reasoning-gym as values that JSON can hold, and back.

Metadata has tuples, dicts with numbers as keys, and numpy's numbers and strings. Verifiers may tell a tuple from a
list, so both are kept apart: a tuple becomes {"tuple": [...]}, any dict {"dict": [[key, value], ...]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore import DataError


def to_json(value: Any) -> Any:
    """Return the value's form in JSON. Raises DataError for a type that no generator of 0.1.25 gives."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, tuple):
        return {"tuple": [to_json(each) for each in value]}
    if isinstance(value, list):
        return [to_json(each) for each in value]
    if isinstance(value, Mapping):
        return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if hasattr(value, "item") and type(value).__module__ == "numpy":
        return value.item()
    raise DataError(f"reasoning-gym gave {value!r:.100}, a {type(value).__name__}, which a row cannot hold")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if isinstance(value, Mapping):
        if "tuple" in value:
            return tuple(from_json(each) for each in value["tuple"])
        return {_key(from_json(key)): from_json(each) for key, each in value["dict"]}
    return value


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
