# ruff: noqa: D102  (Column says what its methods do)
"""Columns whose contents are elsewhere: blocks of rows by reference, and which rows of them a batch holds.

`workers/` makes the blocks. A remote column is taken apart, put together and sent on by reference; whoever reads it
fetches the blocks that it holds rows of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlcore.protocol.columns import Column, ColumnSpec, Value
from rlcore.protocol.rows import Rows

if TYPE_CHECKING:
    from rlcore.protocol.dataproto import DataProto


class Block(ABC):
    """Some rows of one column that another process holds, or will hold once it has made them.

    `nbytes` is their size, 0 while it is not known. `count_in` gets the bytes that a fetch brings here, by column name.
    """

    nbytes: int = 0
    count_in: Counter[str] | None = None
    is_pending = False

    @property
    def is_mapped(self) -> bool:
        """Whether the rows are read where they are, so that a part of them can be read without the rest."""
        return False

    def part(self, start: int, end: int) -> Block:
        """Return the block of the rows from `start` to `end` of one that is mapped."""
        return self

    def same_as(self, other: Block) -> bool:
        """Whether the other is known to be the same rows."""
        return self is other

    @abstractmethod
    def column(self) -> Column:
        """Return the rows, here; of a promise, once it is kept, a column of what it became.

        Raises WorkerError when they are lost, or what the call that should have made them raised.
        """

    @property
    def is_here(self) -> bool:
        """Whether `column` would return at once and without bringing anything here."""
        return False

    @property
    def is_made(self) -> bool:
        """Whether the rows exist, here or elsewhere; or the call that should make them has failed. Never waits."""
        return True

    def load(self, others: Sequence[Block]) -> None:  # noqa: B027  (what is here need not be brought)
        """Bring this block and others of its kind together, so that their `column` returns at once."""


class Owner(ABC):
    """The processes that hold the blocks of a batch: where arithmetic on them runs."""

    @abstractmethod
    def map_rows(
        self, fn: Callable[[DataProto], Any], batch: DataProto, keep_together: Sequence[object] | None
    ) -> DataProto:
        """Return what `fn` makes of the rows, cut over the processes; rows of equal `keep_together` stay together."""

    @abstractmethod
    def reduce_rows(self, fn: Callable[[DataProto], Any], batch: DataProto) -> list[Any]:
        """Return what `fn` returns for each part of the rows."""


class LocalBlock(Block):
    """Rows that are here after all, beside rows that are not."""

    def __init__(self, column: Column) -> None:
        self._column = column

    @property
    def is_here(self) -> bool:
        return True

    def column(self) -> Column:
        return self._column


BlockPicker = Callable[[tuple[Block, ...]], tuple[Block, ...]]
"""Picks from a column's blocks those that its selected rows are in."""


KNOWN_SELECTIONS = 64
"""Most selections of a row map's rows that it remembers, for the other columns that share it."""


class RowMap:
    """Which rows of which blocks: row i is row `row_ids[i]` of block `block_ids[i]`; int64 [rows] each, immutable.

    `is_whole`: it is known to be all rows of every block, in order.
    The columns of one batch share a row map, so that choosing rows is worked out once for all of them.
    """

    __slots__ = ("_joined", "_spans", "_taken", "block_ids", "is_whole", "row_ids")

    def __init__(self, block_ids: Tensor, rows: Tensor, *, is_whole: bool = False) -> None:
        self.block_ids, self.row_ids, self.is_whole = block_ids, rows, is_whole
        self._taken: dict[object, tuple[Rows, tuple[RowMap, BlockPicker]]] = {}
        self._spans: tuple[RowMap, list[tuple[int, int]]] | None = None
        self._joined: tuple[tuple[RowMap, ...], tuple[int, ...], RowMap] | None = None

    @staticmethod
    @lru_cache(maxsize=64)  # so that columns which are made one by one share it, too
    def of_block(rows: int) -> RowMap:
        """Return the row map of all rows of one block."""
        return RowMap(torch.zeros(rows, dtype=torch.int64), torch.arange(rows), is_whole=True)

    def __len__(self) -> int:
        return len(self.row_ids)

    def take(self, rows: Rows, blocks: int) -> tuple[RowMap, BlockPicker]:
        """Return the row map of the selected rows of a column of so many blocks, and what picks those that it needs.

        They are numbered anew, in their order. Without any row the first is kept.
        """
        key = (rows.start, rows.stop) if isinstance(rows, slice) else id(rows)
        known = self._taken.get(key)
        if known is None:
            block_ids = self.block_ids[rows]
            used = torch.zeros(blocks, dtype=torch.bool)
            used[block_ids] = True
            kept = used.nonzero().flatten().tolist() or [0]
            if len(kept) < blocks:
                block_ids = (used.cumsum(0) - 1)[block_ids]
            if len(self._taken) >= KNOWN_SELECTIONS:
                self._taken.clear()
            # The rows are kept with it, so that their id stays theirs.
            self._taken[key] = known = rows, (RowMap(block_ids, self.row_ids[rows]), _picker(kept, blocks))
        return known[1]

    def spans(self, blocks: int) -> tuple[RowMap, list[tuple[int, int]]]:
        """Return each block's used span (start, end), and the row map over blocks trimmed to those spans."""
        known = self._spans
        if known is None:
            first, last = self.row_ids.new_full((blocks,), 2**62), self.row_ids.new_full((blocks,), -1)
            first.scatter_reduce_(0, self.block_ids, self.row_ids, "amin")
            last.scatter_reduce_(0, self.block_ids, self.row_ids, "amax")
            first[last < 0] = 0  # no row of that block is used
            moved = self if not first.any() else RowMap(self.block_ids, self.row_ids - first[self.block_ids])
            self._spans = known = moved, list(zip(first.tolist(), (last + 1).tolist(), strict=True))
        return known

    @staticmethod
    def cat(row_maps: Sequence[RowMap], blocks: Sequence[int]) -> RowMap:
        """Return the row map of columns laid end to end, each of so many blocks."""
        known = row_maps[0]._joined
        if known is not None and known[0] == tuple(row_maps) and known[1] == tuple(blocks):
            return known[2]
        first = np.cumsum([0, *blocks]).tolist()
        block_ids = torch.cat([row_map.block_ids + start for row_map, start in zip(row_maps, first, strict=False)])
        whole = all(row_map.is_whole for row_map in row_maps)
        joined = RowMap(block_ids, torch.cat([row_map.row_ids for row_map in row_maps]), is_whole=whole)
        row_maps[0]._joined = tuple(row_maps), tuple(blocks), joined
        return joined

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_row_map, (self.block_ids.numpy().astype(np.int32), self.row_ids.numpy().astype(np.int32))


def _picker(kept: Sequence[int], blocks: int) -> BlockPicker:
    if len(kept) == blocks:
        return lambda all_blocks: all_blocks
    if len(kept) == 1:
        return lambda all_blocks: (all_blocks[kept[0]],)
    return itemgetter(*kept)  # thousands of blocks of many columns: a loop in Python would show


def _unpickle_row_map(block_ids: np.ndarray, row_ids: np.ndarray) -> RowMap:
    return RowMap(torch.from_numpy(block_ids.astype(np.int64)), torch.from_numpy(row_ids.astype(np.int64)))


class RemoteColumn(Column):
    """Row i is row `row_map.row_ids[i]` of `blocks[row_map.block_ids[i]]`. Its spec is known without the contents."""

    def __init__(self, spec: ColumnSpec, blocks: Sequence[Block], row_map: RowMap, owner: Owner | None = None) -> None:
        self._spec = spec
        self.kind = spec.kind
        self.blocks, self.row_map = tuple(blocks), row_map
        self.owner = owner
        self._local: Column | None = None

    @classmethod
    def of_block(cls, spec: ColumnSpec, block: Block, rows: int) -> RemoteColumn:
        """Return the column of all rows of one block."""
        return cls(spec, [block], RowMap.of_block(rows))

    def bind_owner(self, owner: Owner, counter: Counter[str]) -> None:
        """Learn where the rows live, and who counts what is fetched of them."""
        self.owner = owner
        for block in self.blocks:
            block.count_in = counter

    def wait(self) -> None:
        """Wait until every block is made, and raise what kept one from it. Brings no contents here."""
        promised = [block for block in self.blocks if block.is_pending]
        if promised:
            promised[0].load(promised[1:])
            self._settle()

    def _settle(self) -> None:
        """Put in the place of promises that are kept what became of them."""
        if self.row_map.is_whole and all(block.is_pending and block.is_here for block in self.blocks):
            self._become(cat_columns([block.column() for block in self.blocks]))
            return
        columns: list[Column] = []
        for number, block in enumerate(self.blocks):
            rows = self.row_map.row_ids[self.row_map.block_ids == number]
            if block.is_pending and block.is_here:
                columns.append(block.column().take(_run(rows)))
            else:
                columns.append(RemoteColumn(self._spec, [block], RowMap(torch.zeros_like(rows), rows)))
        place = self.row_map.block_ids.argsort(stable=True).argsort()
        self._become(cat_columns(columns).take(_run(place)))

    def _become(self, settled: Column) -> None:
        """Have the blocks, and the rows of them, of a column of the same contents."""
        if not isinstance(settled, RemoteColumn):
            self._local = settled
            settled = RemoteColumn.of_block(self._spec, LocalBlock(settled), len(settled))
        self.blocks, self.row_map = settled.blocks, settled.row_map
        self._narrow()

    def _narrow(self) -> None:
        """Leave out of mapped blocks the rows before and after those that are used."""
        if len(self) and all(block.is_mapped and not block.is_here for block in self.blocks):
            self.row_map, spans = self.row_map.spans(len(self.blocks))
            self.blocks = tuple(block.part(*span) for block, span in zip(self.blocks, spans, strict=True))

    @property
    def is_made(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return all(block.is_made for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks; guessed from the form where they are not made yet."""
        if not any(block.is_pending for block in self.blocks):
            return sum(block.nbytes for block in self.blocks)
        return self._spec.estimated_bytes(len(self))

    def here(self) -> Column:
        """Return the column with its contents, which are fetched once."""
        if self._local is None:
            self.wait()
        if self._local is None:
            away = [block for block in self.blocks if not block.is_here]
            if away:
                away[0].load(away[1:])
            if len(self.blocks) == 1:
                self._local = self.blocks[0].column().take(_run(self.row_map.row_ids))
            else:
                order = self.row_map.block_ids.argsort(stable=True)
                counts = torch.bincount(self.row_map.block_ids, minlength=len(self.blocks)).tolist()
                by_block = self.row_map.row_ids[order].split(counts)
                parts = [block.column().take(_run(rows)) for block, rows in zip(self.blocks, by_block, strict=True)]
                joined = parts[0].cat(parts[1:])
                self._local = joined.take(_run(order.argsort()))
        return self._local

    def same_as(self, other: Column) -> bool:
        """Whether the other is known to hold the same contents without fetching either."""
        return self is other or (
            isinstance(other, RemoteColumn)
            and len(self) == len(other)
            and len(self.blocks) == len(other.blocks)
            and all(block.same_as(theirs) for block, theirs in zip(self.blocks, other.blocks, strict=True))
            and torch.equal(self.row_map.block_ids, other.row_map.block_ids)
            and torch.equal(self.row_map.row_ids, other.row_map.row_ids)
        )

    def __len__(self) -> int:
        return len(self.row_map)

    def spec(self) -> ColumnSpec:
        return self._spec

    def view(self) -> Value:
        return self.here().view()

    def read(self) -> Value:
        return self.here().read()

    def row(self, row: int) -> Any:
        taken = self.take(slice(row, row + 1))
        return (taken.here() if isinstance(taken, RemoteColumn) else taken).row(0)

    def take(self, rows: Rows) -> Column:
        # What was only read here still travels by reference.
        if self._local is not None and all(isinstance(block, LocalBlock) for block in self.blocks):
            return self._local.take(rows)
        if isinstance(rows, slice) and rows == slice(0, len(self)):
            return self
        row_map, kept = self.row_map.take(rows, len(self.blocks))
        return RemoteColumn(self._spec, kept(self.blocks), row_map, self.owner)

    def cat(self, others: Sequence[Column]) -> Column:
        return cat_columns([self, *others])

    def unfold(self, parts: int) -> Column:
        return self.here().unfold(parts)

    def to(self, device: str | torch.device) -> Column:
        return self if str(device) == "cpu" and self._spec.device == "cpu" else self.here().to(device)

    def deepcopy(self) -> Column:
        return self.here().deepcopy()

    def __reduce__(self) -> tuple[Any, ...]:
        if any(block.is_pending and block.is_here for block in self.blocks):
            self._settle()  # what is small came with the reply, and now travels on without a reference
        self._narrow()
        blocks, row_map = list(self.blocks), self.row_map
        held = [number for number, block in enumerate(blocks) if isinstance(block, LocalBlock)]
        if held:
            rows = row_map.row_ids.clone()
            for number in held:  # of what is here, only these rows travel
                place = row_map.block_ids == number
                blocks[number] = LocalBlock(blocks[number].column().take(_run(rows[place])))
                rows[place] = torch.arange(int(place.sum()))
            row_map = RowMap(row_map.block_ids, rows)
        return RemoteColumn, (self._spec, blocks, row_map)


def cat_columns(columns: Sequence[Column]) -> Column:
    """Return the rows of all columns, of one form, in order: by reference when any of them is remote."""
    remote = [column for column in columns if isinstance(column, RemoteColumn)]
    if not remote:
        return columns[0].cat(columns[1:]) if len(columns) > 1 else columns[0]
    parts = [
        column
        if isinstance(column, RemoteColumn)
        else RemoteColumn.of_block(column.spec(), LocalBlock(column), len(column))
        for column in columns
    ]
    row_map = RowMap.cat([part.row_map for part in parts], [len(part.blocks) for part in parts])
    return RemoteColumn(remote[0].spec(), [b for part in parts for b in part.blocks], row_map, remote[0].owner)


def owner_of(columns: Sequence[Column]) -> Owner | None:
    """Return where the largest remote one of some columns lives, so that it need not move; None when all are here."""
    remote = [column for column in columns if isinstance(column, RemoteColumn) and column.owner is not None]
    return max(remote, key=lambda column: column.nbytes).owner if remote else None


def _run(rows: Tensor) -> Rows:
    """Return row numbers that follow one another as a slice, of which a column shares the storage."""
    if not len(rows):
        return slice(0, 0)
    first = int(rows[0])
    return slice(first, first + len(rows)) if torch.equal(rows, torch.arange(first, first + len(rows))) else rows
