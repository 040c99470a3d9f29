"""Values of a data set's rows by key: a column's name, or a path into a column, as `reward_model.ground_truth`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.errors import did_you_mean

ANSWERS = ("ground_truth", "answer", "solution", "final_answer", "reference_answer", "target", "label")
"""Names under which data sets keep the reference answer."""


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field inside one for a key with dots; None if there is none.

    A column whose own name has dots comes first.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def nearest(row: Mapping[str, Any], key: str) -> str:
    """Return `" Did you mean 'x'?"` for the key of a row that is nearest to `key` and holds no object of its own."""
    return did_you_mean(key, list(_keys(row)))


def answer_fault(row: Mapping[str, Any], key: str) -> str | None:
    """Return what is wrong with a row's reference answer, and the likely remedy; None if it is one."""
    value = value_at(row, key)
    if value is None:
        fault = f"there is nothing in column {key!r}"
    elif isinstance(value, float) and math.isnan(value):
        fault = f"column {key!r} holds NaN"
    elif isinstance(value, Mapping):
        fault = f"column {key!r} holds an object with {', '.join(map(str, value)) or 'nothing'}"
    else:
        return None
    found = [name for wanted in ANSWERS for name in _keys(row) if name.rpartition(".")[2] == wanted and name != key]
    usable = [name for name in found if answer_fault(row, name) is None]
    hint = f", as data.answer_key={usable[0]}" if usable else ""
    return f"{fault}; its columns are {', '.join(row) or 'none'}. Set data.answer_key to the one with the answers{hint}"


def _keys(row: Mapping[str, Any]) -> Iterator[str]:
    """Give the keys of all values that are not objects, with dots where they are inside one."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _keys(value))
        else:
            yield str(name)
