"""Metrics of work that is still under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


class Metrics(MutableMapping[str, Any]):
    """Metrics by name that are fetched when one of them is first read; until then nobody waits for them.

    Adding one, by `metrics[name] = value` or `update`, does not read. Raises what kept them from being made.
    """

    def __init__(self, fetch: Callable[[], Mapping[str, Any]]) -> None:
        self._fetch: Callable[[], Mapping[str, Any]] | None = fetch
        self._values: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        if self._fetch is not None:
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
