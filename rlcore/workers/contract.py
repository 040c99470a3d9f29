"""A registered method's declaration of the columns that it reads and of those that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlcore.errors import DataError, did_you_mean
from rlcore.protocol import DataProto
from rlcore.protocol.balance import SplitBatch
from rlcore.protocol.columns import ColumnSpec

Reads: TypeAlias = Sequence[str] | Callable[..., Iterable[str]]
"""Columns that a method reads, or a function of the call's arguments that returns their names."""
Gives: TypeAlias = Mapping[str, ColumnSpec] | Callable[..., Mapping[str, ColumnSpec]]
"""Columns that a method returns, or a function of the call's arguments that returns them."""
CallArgs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""One rank's positional and keyword arguments."""


@dataclass(frozen=True)
class DeclaredResult:
    """The result that one rank declares before the call: a batch of `rows` rows with these columns."""

    rows: int
    columns: Mapping[str, ColumnSpec]

    def may_exceed(self, nbytes: int) -> list[str]:
        """Return the columns that are larger than `nbytes` bytes, or whose size is not known before the call."""
        sizes = {name: spec.exact_bytes(self.rows) for name, spec in self.columns.items()}
        return [name for name, size in sizes.items() if size is None or size > nbytes]

    def check(self, result: Any) -> None:
        """Raise DataError unless a result has the declared type, columns and row count."""
        if not isinstance(result, DataProto):
            raise DataError(f"returned {type(result).__name__}, but declares a DataProto of {list(self.columns)}")
        if result.meta_info:
            raise DataError(
                f"returned meta_info {list(result.meta_info)}; a method that declares `gives` must return none"
            )
        found = result.table.columns
        if missing := [name for name in self.columns if name not in found]:
            raise DataError(f"did not return {missing}, which it declares in `gives`; it returned {list(found)}")
        if further := [name for name in found if name not in self.columns]:
            near = did_you_mean(further[0], self.columns)
            raise DataError(
                f"returned {further}, which it does not declare; `gives` has {list(self.columns)}.{near} Declare "
                "the column or do not return it."
            )
        for name, column in found.items():
            if len(column) != self.rows:
                raise DataError(f"returned {len(column)} rows of {name!r} for {self.rows} rows that it was sent")
            spec = column.spec()
            # Results travel on the CPU, so a column may be on the worker's GPU.
            if spec._replace(device="cpu") != self.columns[name]:
                raise DataError(f"returned {name!r} as {spec}, but declares it as {self.columns[name]}")


@dataclass(frozen=True)
class Contract:
    """The columns that a method reads and returns, and its number of rows; `gives` is None if it declares no result."""

    reads: Reads = ()
    gives: Gives | None = None
    rows: Callable[..., int] | None = None

    def check(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], producers: Callable[[str], str]
    ) -> None:
        """Raise DataError when the call's batch lacks a column that `method` reads.

        `producers` returns a sentence for the message: where a column comes from.
        """
        reads = self.reads(*args, **kwargs) if callable(self.reads) else self.reads
        batch = first_batch(args, kwargs)
        if batch is None:
            return
        for name in reads:
            if name not in batch:
                raise DataError(
                    f"{method} reads the column {name!r}, which its batch lacks; the batch has {batch.keys()}."
                    f"{did_you_mean(name, batch.keys())} {producers(name)}"
                )

    def declared_results(
        self, calls: Sequence[CallArgs | None], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[DeclaredResult | None] | None:
        """Return each rank's declared result; None if the method declares none.

        A rank's entry is None if it is not called, or if its row count is unknown.
        """
        columns = self.gives(*args, **kwargs) if callable(self.gives) else self.gives
        if columns is None:
            return None
        return [None if call is None else self._declared_result(columns, *call) for call in calls]

    def _declared_result(
        self, columns: Mapping[str, ColumnSpec], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> DeclaredResult | None:
        if self.rows is not None:
            return DeclaredResult(self.rows(*args, **kwargs), columns)
        batch = first_batch(args, kwargs)
        return None if batch is None else DeclaredResult(len(batch), columns)


def first_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DataProto | None:
    """Return the first batch among a call's arguments, of a SplitBatch the first part; None without one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (DataProto, SplitBatch)):
            return value if isinstance(value, DataProto) else value.parts[0]
    return None
