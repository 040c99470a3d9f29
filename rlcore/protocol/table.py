"""The contents of a DataProto: named columns of equal row count and meta_info, present or fetched at first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor

from rlcore.errors import DataError, MissingColumnError, did_you_mean
from rlcore.protocol.columns import Column, Kind, same_contents
from rlcore.protocol.remote import cat_columns
from rlcore.protocol.rows import Rows

_IN_WORDS: dict[Kind, str] = {"dense": "a tensor", "ragged": "a tensor", "object": "an object"}


@dataclass
class Table:
    """Columns by name, in order of binding, and meta_info. A table belongs to one DataProto; columns are shared.

    `kept`: bool, one entry for each row of the batch that this one belongs to: whether the row is here. None: all are.
    `bare_rows`: the number of rows of a table without columns; a table with columns has as many rows as they.
    """

    columns: dict[str, Column] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    kept: Tensor | None = None
    bare_rows: int = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()))) if self.columns else self.bare_rows

    def bind(self, name: str, column: Column) -> None:
        """Bind a column to a name, replacing an earlier one; DataError when its length differs from the others'."""
        if not self.columns and self.bare_rows not in (0, len(column)):
            raise DataError(
                f"column {name!r} has {len(column)} rows, but the batch has {self.bare_rows}, which it keeps without "
                "columns; make a new batch for other rows"
            )
        other = next((other for other in self.columns if other != name), None)  # all others have equal lengths
        if other is not None and len(self.columns[other]) != len(column):
            raise DataError(
                f"column {name!r} has {len(column)} rows, but the batch has {len(self.columns[other])} "
                f"(as in column {other!r}); a column needs one entry per row"
            )
        self.columns[name] = column

    def column(self, name: str, kinds: Sequence[Kind] = ("dense", "ragged", "object")) -> Column:
        """Return the column of a name; MissingColumnError, with the nearest name, if none of these kinds has it."""
        found = self.columns.get(name)
        if found is None:
            raise MissingColumnError(
                f"the batch has no column {name!r}; it has {list(self.columns)}.{did_you_mean(str(name), self.columns)}"
            )
        if found.kind not in kinds:
            raise MissingColumnError(
                f"column {name!r} is {_IN_WORDS[found.kind]} column, but {_IN_WORDS[kinds[0]]} column is needed here"
            )
        return found

    def meta(self, key: str) -> Any:
        """Return one value of meta_info; DataError, with the nearest key, if it is missing."""
        if key not in self.meta_info:
            near = did_you_mean(str(key), self.meta_info)
            raise DataError(f"meta_info has no key {key!r}; it has {list(self.meta_info)}.{near}")
        return self.meta_info[key]

    def drop(self, name: str) -> None:
        """Remove a column; the rows stay."""
        self.bare_rows = self.rows
        del self.columns[name]

    def with_columns(self, columns: dict[str, Column]) -> Table:
        """Return a new table of these columns, for the same rows, with the same meta_info."""
        return Table(columns, dict(self.meta_info), self.kept, self.rows)

    def immutable(self) -> Table:
        """Return a new table of the same contents, which nobody writes to."""
        return self.with_columns({name: column.immutable() for name, column in self.columns.items()})

    def take(self, rows: Rows) -> Table:
        """Return the selected rows of every column."""
        taken = self.split([rows])[0]
        if isinstance(rows, slice) and rows == slice(0, self.rows):
            taken.kept = self.kept
        return taken

    def split(self, selections: Sequence[Rows]) -> list[Table]:
        """Return a table for each selection, with its rows of every column."""
        sizes = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in selections]
        parts = [Table(meta_info=dict(self.meta_info), bare_rows=size) for size in sizes]
        for name, column in self.columns.items():  # column by column: one column's blocks fit a core's cache
            for part, rows in zip(parts, selections, strict=True):
                part.columns[name] = column.take(rows)
        return parts


class LazyTable:
    """The table that `fetch` returns at the first `get`. If `fetch` raises, every `get` raises that error."""

    def __init__(self, fetch: Callable[[], Table]) -> None:
        self._fetch: Callable[[], Table] | None = fetch
        self._table: Table | None = None
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None
        self._lock = threading.RLock()

    @property
    def ready(self) -> bool:
        """Whether the table has been fetched."""
        return self._table is not None

    def get(self) -> Table:
        """Return the table; fetches it first if necessary."""
        # Other threads wait for the one fetch.
        with self._lock:
            if self._fetch is not None:
                try:
                    self._table = self._fetch()
                except Exception as error:
                    self._error, self._traceback = error, error.__traceback__
                self._fetch = None
            if self._error is not None:
                # The original traceback: each raise would otherwise append to the last one.
                raise self._error.with_traceback(self._traceback)
            assert self._table is not None
            return self._table


def concat_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables in order; DataError for no table, different columns, or conflicting meta_info.

    A table without columns and rows adds only its meta_info.
    """
    if not tables:
        raise DataError("nothing to concatenate: the list of batches is empty")
    # A rank without rows may return a batch without columns.
    filled = [table for table in tables if table.columns or table.rows]
    joined = Table(bare_rows=sum(table.rows for table in tables))
    for table in tables:
        _join_meta(joined.meta_info, table.meta_info)
    if not filled:
        return joined
    for table in filled[1:]:
        unshared = sorted(filled[0].columns.keys() ^ table.columns.keys())
        if unshared:
            raise DataError(f"batches to concatenate must have the same columns; only some of them have {unshared}")
    for name, column in filled[0].columns.items():
        parts = [table.columns[name] for table in filled[1:]]
        for part in parts:
            if part.spec() != column.spec():
                raise DataError(
                    f"column {name!r} cannot be concatenated: {column.type_name()} with {part.type_name()}; "
                    "kind, dtype, shape of a row and device must be equal (rows of different length are a Ragged)"
                )
        joined.columns[name] = cat_columns([column, *parts]) if parts else column
    return joined


def union_tables(left: Table, right: Table) -> Table:
    """Return the columns and meta_info of both, for the rows that both keep.

    Raises DataError naming a column or key with different contents, and for row counts that do not fit.
    """
    left, right = _without_others(left, right.kept), _without_others(right, left.kept)
    if left.rows != right.rows and all(table.columns or table.rows for table in (left, right)):
        raise DataError(f"union of batches with {left.rows} and {right.rows} rows; both must have the same rows")
    joined = left.with_columns(dict(left.columns))
    joined.kept = right.kept if left.kept is None else left.kept
    joined.bare_rows = max(left.rows, right.rows)
    for name, column in right.columns.items():
        mine = joined.columns.setdefault(name, column)
        if not same_contents(mine, column):
            raise DataError(
                f"union of batches that both have a column {name!r}, with different contents "
                f"({mine.type_name()} and {column.type_name()}); rename or pop one of them"
            )
    _join_meta(joined.meta_info, right.meta_info)
    return joined


def _without_others(table: Table, kept: Tensor | None) -> Table:
    """Return the rows of a table that another one keeps, if the table still has the others."""
    if kept is None:
        return table
    if table.kept is not None and len(table.kept) == len(kept):
        here = kept[table.kept]  # both belong to the same batch
    elif table.rows == len(kept):
        here = kept
    else:
        return table
    taken = table.take(here.nonzero().flatten())
    if table.kept is None:
        taken.kept = kept
    else:
        taken.kept = table.kept.clone()
        taken.kept[table.kept] = here
    return taken


def _join_meta(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if not same_contents(into.setdefault(key, value), value):
            raise DataError(
                f"meta_info {key!r} differs between the batches: {into[key]!r:.80} and {value!r:.80}; "
                "make them equal or drop the key with select(meta_info_keys=...)"
            )
