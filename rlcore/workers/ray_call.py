"""A call on its way to one rank: what is small travels as one run of bytes, which costs Ray far less than its parts."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ray
import torch

from rlcore.protocol import DataProto
from rlcore.protocol.small_columns import is_small
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.dispatch import Call

MESSAGE_BYTES = 64_000
"""A batch of more bytes is an argument of its own, so that Ray can keep it out of the way of what is small."""
NUMBERS = (type(None), bool, int, float, torch.dtype)
SENT_AS_THEY_ARE = (*NUMBERS, ray.ObjectRef)
"""Types of arguments that are not worth an object of their own when all ranks get the same."""


class ArgumentRef(NamedTuple):
    """In the place of an argument: its number among those that Ray carries."""

    number: int


class EncodedCall(NamedTuple):
    """A call for one rank: `message`, and the arguments that Ray carries beside it."""

    message: bytes
    extra: tuple[Any, ...]


def encode_calls(
    role: str, method: str, calls: Sequence[Call | None], declared: Sequence[DeclaredResult | None] | None
) -> list[EncodedCall | None]:
    """Return each rank's call as it travels. What several ranks get, and is large, is put into Ray's store once."""
    gives = next((each.columns for each in declared or () if each is not None), None)
    header = pickle.dumps((role, method, gives))
    times = Counter(id(value) for call in calls if call for value in (*call[0], *call[1].values()))
    put: dict[int, Any] = {}
    packed: list[EncodedCall | None] = []
    for rank, call in enumerate(calls):
        if call is None:
            packed.append(None)
            continue
        extra: list[Any] = []

        def placed(value: Any, extra: list[Any] = extra) -> Any:
            if _travels_inside(value):
                return value
            if times[id(value)] > 1 and not isinstance(value, SENT_AS_THEY_ARE):
                if id(value) not in put:
                    put[id(value)] = ray.put(value)
                value = put[id(value)]
            extra.append(value)
            return ArgumentRef(len(extra) - 1)

        args = [placed(value) for value in call[0]]
        kwargs = {name: placed(value) for name, value in call[1].items()}
        expected = declared[rank] if declared is not None else None
        rows = None if expected is None else expected.rows
        packed.append(EncodedCall(ray.cloudpickle.dumps((header, rows, args, kwargs)), tuple(extra)))
    return packed


def decode_call(
    message: bytes, extra: Sequence[Any]
) -> tuple[str, str, DeclaredResult | None, list[Any], dict[str, Any]]:
    """Return role, method, what was declared, and the arguments of a call that `encode_calls` made."""
    header, rows, args, kwargs = pickle.loads(message)
    role, method, gives = _read_header(header)

    def whole(value: Any) -> Any:
        return extra[value.number] if isinstance(value, ArgumentRef) else value

    declared = None if rows is None else DeclaredResult(rows, gives)
    return role, method, declared, [whole(value) for value in args], {name: whole(v) for name, v in kwargs.items()}


@lru_cache(maxsize=256)
def _read_header(header: bytes) -> Any:
    return pickle.loads(header)


def _travels_inside(value: Any) -> bool:
    """Whether a value is small, and known to hold no reference, which only Ray may pickle."""
    if isinstance(value, NUMBERS):
        return True
    if isinstance(value, str):
        return len(value) <= MESSAGE_BYTES
    if isinstance(value, DataProto):
        columns = value.table.columns.values()
        return (
            all(is_small(column) for column in columns)
            and sum(column.view().nbytes for column in columns) <= MESSAGE_BYTES
            and _travels_inside(dict(value.meta_info))
        )
    if type(value) in (list, tuple):
        return all(_travels_inside(item) for item in value)
    if type(value) is dict:
        return all(isinstance(key, str) and _travels_inside(item) for key, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return all(_travels_inside(getattr(value, field.name)) for field in fields(value))
    return False
