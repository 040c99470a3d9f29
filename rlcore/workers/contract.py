"""What a registered method declares of its batches: the columns that it reads and those that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlcore.errors import DataError, did_you_mean
from rlcore.protocol import DataProto
from rlcore.protocol.balance import SplitBatch
from rlcore.protocol.columns import ColumnSpec

Reads: TypeAlias = Sequence[str] | Callable[..., Iterable[str]]
"""Columns that a method reads, or a function of the call's arguments that names them."""
Gives: TypeAlias = Mapping[str, ColumnSpec] | Callable[..., Mapping[str, ColumnSpec]]
"""Columns that a method gives, or a function of the call's arguments that says which."""


@dataclass(frozen=True)
class DeclaredResult:
    """What one rank will return: so many rows of these columns."""

    rows: int
    columns: Mapping[str, ColumnSpec]

    def may_exceed(self, nbytes: int) -> list[str]:
        """Return the columns that are not known to have at most so many bytes."""
        known = {name: spec.exact_bytes(self.rows) for name, spec in self.columns.items()}
        return [name for name, size in known.items() if size is None or size > nbytes]

    def check(self, result: Any) -> None:
        """Raise DataError unless a result is what was declared."""
        if not isinstance(result, DataProto):
            raise DataError(f"returned {type(result).__name__}, but declares a DataProto of {list(self.columns)}")
        if result.meta_info:
            raise DataError(f"returned meta_info {list(result.meta_info)}; a method that declares `gives` returns none")
        found = result.table.columns
        if missing := [name for name in self.columns if name not in found]:
            raise DataError(f"did not return {missing}, which it declares in `gives`; it returned {list(found)}")
        if further := [name for name in found if name not in self.columns]:
            near = did_you_mean(further[0], self.columns)
            raise DataError(
                f"returned {further}, which it does not declare; `gives` has {list(self.columns)}.{near} Declare a "
                "column or leave it out."
            )
        for name, column in found.items():
            if len(column) != self.rows:
                raise DataError(f"returned {len(column)} rows of {name!r} for {self.rows} rows that it was sent")
            spec = column.spec()
            if spec._replace(device="cpu") != self.columns[name]:
                raise DataError(f"returned {name!r} as {spec}, but declares it as {self.columns[name]}")


@dataclass(frozen=True)
class Contract:
    """What a method reads and gives, and of how many rows; `gives` is None where it declares nothing."""

    reads: Reads = ()
    gives: Gives | None = None
    rows: Callable[..., int] | None = None

    def check(self, what: str, args: Sequence[Any], kwargs: Mapping[str, Any], givers: Callable[[str], str]) -> None:
        """Raise DataError when the call's batch lacks a column; `givers` says in words who could have given it."""
        reads = self.reads(*args, **kwargs) if callable(self.reads) else self.reads
        batch = _batch(args, kwargs)
        if batch is None:
            return
        for name in reads:
            if name not in batch:
                raise DataError(
                    f"{what} reads the column {name!r}, which its batch lacks; the batch has {batch.keys()}."
                    f"{did_you_mean(name, batch.keys())} {givers(name)}"
                )

    def columns(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, ColumnSpec] | None:
        """Return the columns that a call will give; None when that is not declared."""
        return self.gives(*args, **kwargs) if callable(self.gives) else self.gives

    def declared_result(
        self, columns: Mapping[str, ColumnSpec], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> DeclaredResult | None:
        """Return what a rank that gets these arguments will return; None when its rows are not known."""
        if self.rows is not None:
            return DeclaredResult(self.rows(*args, **kwargs), columns)
        batch = _batch(args, kwargs)
        return None if batch is None else DeclaredResult(len(batch), columns)


def _batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DataProto | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (DataProto, SplitBatch)):
            return value if isinstance(value, DataProto) else value.parts[0]
    return None
