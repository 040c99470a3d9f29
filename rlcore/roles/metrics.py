"""Metrics of calls that may still be running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


class Metrics(MutableMapping[str, Any]):
    """Metrics by name, fetched at the first read; the read waits for the call and raises its error.

    Adding one, by `metrics[name] = value` or `update`, does not read.
    """

    def __init__(self, fetch: Callable[[], Mapping[str, Any]]) -> None:
        self._fetch: Callable[[], Mapping[str, Any]] | None = fetch
        self._values: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        if self._fetch is not None:
            # Values that were set before the read win.
            self._values = {**self._fetch(), **self._values}
            self._fetch = None
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def __repr__(self) -> str:
        return repr(self._read())
