"""A call sent to one rank: small arguments travel together as one byte string, which costs Ray much less."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ray
import torch

from rlcore.protocol import DataProto
from rlcore.protocol.remote import RemoteColumn
from rlcore.protocol.small_columns import is_small
from rlcore.workers.contract import CallArgs, DeclaredResult

MESSAGE_BYTES = 64_000
"""Larger batches and strings are arguments of their own, which Ray can keep in its store."""
NUMBERS = (type(None), bool, int, float, torch.dtype)
NEVER_STORED = (*NUMBERS, ray.ObjectRef)
"""Types of arguments that are not put into Ray's store, even if several ranks get the same one."""


class ArgumentRef(NamedTuple):
    """In the message, stands for the argument that Ray carries as extra argument `number`."""

    number: int


class EncodedCall(NamedTuple):
    """A call for one rank: `message`, and the extra arguments that Ray carries with it."""

    message: bytes
    extra: tuple[Any, ...]


def encode_calls(
    role: str, method: str, calls: Sequence[CallArgs | None], declared: Sequence[DeclaredResult | None] | None
) -> list[EncodedCall | None]:
    """Return each rank's call, encoded. A large argument of several ranks is put into Ray's store once."""
    gives = next((each.columns for each in declared or () if each is not None), None)
    # Pickled once for all ranks; the receiver caches the result by its bytes.
    header = pickle.dumps((role, method, gives))
    arguments = _Arguments(calls)
    encoded: list[EncodedCall | None] = []
    for rank, call in enumerate(calls):
        if call is None:
            encoded.append(None)
            continue
        extra: list[Any] = []
        args = [arguments.encode(value, extra) for value in call[0]]
        kwargs = {name: arguments.encode(value, extra) for name, value in call[1].items()}
        expected = None if declared is None else declared[rank]
        rows = None if expected is None else expected.rows
        encoded.append(EncodedCall(ray.cloudpickle.dumps((header, rows, args, kwargs)), tuple(extra)))
    return encoded


class _Arguments:
    """The arguments of a call on several ranks; those in Ray's store, by id."""

    def __init__(self, calls: Sequence[CallArgs | None]) -> None:
        # By id: the same object given to several ranks is stored once. `calls` keeps the objects, so ids stay unique.
        self._uses: Counter[int] = Counter()
        self._stored: dict[int, Any] = {}
        for call in calls:
            if call is not None:
                self._uses.update(id(value) for value in (*call[0], *call[1].values()))

    def encode(self, value: Any, extra: list[Any]) -> Any:
        """Return a value that fits in the message, or append it to `extra` and return its ArgumentRef."""
        if _fits_in_message(value):
            return value
        if self._uses[id(value)] > 1 and not isinstance(value, NEVER_STORED):
            if id(value) not in self._stored:
                self._stored[id(value)] = ray.put(value)
            value = self._stored[id(value)]
        extra.append(value)
        return ArgumentRef(len(extra) - 1)


def decode_call(
    message: bytes, extra: Sequence[Any]
) -> tuple[str, str, DeclaredResult | None, list[Any], dict[str, Any]]:
    """Return role, method, declared result, and positional and keyword arguments of a call from `encode_calls`."""
    header, rows, args, kwargs = pickle.loads(message)
    role, method, gives = _read_header(header)

    def argument(value: Any) -> Any:
        return extra[value.number] if isinstance(value, ArgumentRef) else value

    declared = None if rows is None else DeclaredResult(rows, gives)
    by_name = {name: argument(value) for name, value in kwargs.items()}
    return role, method, declared, [argument(value) for value in args], by_name


@lru_cache(maxsize=256)
def _read_header(header: bytes) -> Any:
    return pickle.loads(header)


def _fits_in_message(value: Any) -> bool:
    """Whether a value is small and certain to contain no ObjectRef; Ray must pickle those itself."""
    if isinstance(value, NUMBERS):
        return True
    if isinstance(value, str):
        return len(value) <= MESSAGE_BYTES
    if isinstance(value, DataProto):
        return _is_small_batch(value)
    if type(value) is dict:
        return all(isinstance(key, str) for key in value) and all(map(_fits_in_message, value.values()))
    if type(value) in (list, tuple):
        return all(map(_fits_in_message, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_fits_in_message(getattr(value, field.name)) for field in fields(value))
    return False


def _is_small_batch(batch: DataProto) -> bool:
    columns = batch.table.columns.values()
    return (
        all(is_small(column) for column in columns)
        and sum(column.view().nbytes for column in columns) <= MESSAGE_BYTES
        and _fits_in_message(dict(batch.meta_info))
    )


def await_inputs(value: Any) -> None:
    """Wait until the remote columns in a call's arguments are computed; raises the error of a call that failed."""
    for batch in batches_in(value):
        for column in batch.table.columns.values():
            if isinstance(column, RemoteColumn):
                column.wait()


def batches_in(value: Any) -> Iterator[DataProto]:
    """Iterate over every DataProto in a value, also inside lists, tuples, dicts and dataclasses."""
    if isinstance(value, DataProto):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from batches_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from batches_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from batches_in(getattr(value, field.name))
