# ruff: noqa: D102  (Column documents its methods)
"""Columns whose contents are in another process: references to blocks of rows, and the rows of them that a batch holds.

`workers/` implements the blocks. Selecting, joining and sending a remote column moves references only; a read fetches
the blocks that hold the column's rows.
"""

from __future__ import annotations

import itertools
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
    """Some rows of one column in another process, which may still have to compute them.

    `nbytes` is their size in bytes, 0 while unknown. A fetch adds its bytes to `fetch_counter`, by column name.
    `must_resolve`: the block stands in for a result, and RemoteColumn replaces it by the returned column.
    """

    nbytes: int = 0
    fetch_counter: Counter[str] | None = None
    must_resolve = False

    @property
    def is_mapped(self) -> bool:
        """Whether the rows lie in shared memory, so that a few of them can be read without the others."""
        return False

    def part(self, start: int, end: int) -> Block:
        """Return the rows from `start` to `end` of a mapped block as a block."""
        return self

    def same_as(self, other: Block) -> bool:
        """Whether both are known to hold the same rows."""
        return self is other

    @abstractmethod
    def column(self) -> Column:
        """Wait for the rows and return them, in this process; from a block that must resolve, the returned column.

        Raises WorkerError when the rows are lost, or the error of the call that should have computed them.
        """

    @property
    def is_local(self) -> bool:
        """Whether `column` returns at once and transfers nothing."""
        return False

    @property
    def is_ready(self) -> bool:
        """Whether the rows are computed, or the call that computes them has failed. Never waits."""
        return True

    def load(self, others: Sequence[Block]) -> None:  # noqa: B027  (a local block has nothing to load)
        """Fetch this block and others of its class together, so that their `column` returns at once."""


class Owner(ABC):
    """The processes that hold a batch's blocks. Functions of the rows run in them."""

    @abstractmethod
    def map_rows(
        self, fn: Callable[[DataProto], Any], batch: DataProto, keep_together: Sequence[object] | None
    ) -> DataProto:
        """Return the batch that `fn` makes of the rows, split over the processes.

        Rows with equal values of `keep_together` go to the same process.
        """

    @abstractmethod
    def reduce_rows(self, fn: Callable[[DataProto], Any], batch: DataProto) -> list[Any]:
        """Return the result of `fn` for each part of the rows."""


class LocalBlock(Block):
    """Rows in this process, inside a column whose other rows are remote."""

    def __init__(self, column: Column) -> None:
        self._column = column

    @property
    def is_local(self) -> bool:
        return True

    def column(self) -> Column:
        return self._column


BlockPicker = Callable[[tuple[Block, ...]], tuple[Block, ...]]
"""Picks from a column's blocks those that hold its selected rows."""


KNOWN_SELECTIONS = 64
"""Selections that a row map remembers for the other columns that share it."""


class RowMap:
    """Maps rows to blocks: row i is row `row_ids[i]` of block `block_ids[i]`. Both are int64 [rows] and immutable.

    `is_whole`: the map is known to list all rows of every block, in order. The columns of a batch share one map, so
    that each selection is computed once for all of them.
    """

    __slots__ = ("_joined", "_spans", "_taken", "block_ids", "is_whole", "row_ids")

    def __init__(self, block_ids: Tensor, row_ids: Tensor, *, is_whole: bool = False) -> None:
        self.block_ids, self.row_ids, self.is_whole = block_ids, row_ids, is_whole
        self._taken: dict[object, tuple[Rows, tuple[RowMap, BlockPicker]]] = {}
        self._spans: tuple[RowMap, list[tuple[int, int]]] | None = None
        self._joined: tuple[tuple[RowMap, ...], tuple[int, ...], RowMap] | None = None

    @staticmethod
    @lru_cache(maxsize=64)  # columns made one by one share their map too
    def of_block(rows: int) -> RowMap:
        """Return the map of all rows of one block."""
        return RowMap(torch.zeros(rows, dtype=torch.int64), torch.arange(rows), is_whole=True)

    def __len__(self) -> int:
        return len(self.row_ids)

    def take(self, rows: Rows, blocks: int) -> tuple[RowMap, BlockPicker]:
        """Return the map of the selected rows, and the picker of the blocks that hold them, from `blocks` blocks.

        The picked blocks keep their order and are numbered anew. A selection of no rows keeps the first block.
        """
        # By identity, as hashing the numbers would cost as much as selecting.
        key = (rows.start, rows.stop) if isinstance(rows, slice) else id(rows)
        known = self._taken.get(key)
        if known is None:
            block_ids = self.block_ids[rows]
            used = torch.zeros(blocks, dtype=torch.bool)
            used[block_ids] = True
            kept = used.nonzero().flatten().tolist() or [0]
            if len(kept) < blocks:
                block_ids = (used.cumsum(0) - 1)[block_ids]
            # Bounded, since a long-lived batch may be sliced without end.
            if len(self._taken) >= KNOWN_SELECTIONS:
                self._taken.clear()
            # Holding `rows` keeps its id from being used again for another tensor.
            self._taken[key] = known = rows, (RowMap(block_ids, self.row_ids[rows]), _picker(kept, blocks))
        return known[1]

    def spans(self, blocks: int) -> tuple[RowMap, list[tuple[int, int]]]:
        """Return each block's used span (first row, last row + 1), and the map over blocks cut to these spans."""
        known = self._spans
        if known is None:
            # 2**62 and -1 are the neutral values of min and max.
            first, last = self.row_ids.new_full((blocks,), 2**62), self.row_ids.new_full((blocks,), -1)
            first.scatter_reduce_(0, self.block_ids, self.row_ids, "amin")
            last.scatter_reduce_(0, self.block_ids, self.row_ids, "amax")
            first[last < 0] = 0  # a block without a used row
            moved = self if not first.any() else RowMap(self.block_ids, self.row_ids - first[self.block_ids])
            self._spans = known = moved, list(zip(first.tolist(), (last + 1).tolist(), strict=True))
        return known

    @staticmethod
    def cat(row_maps: Sequence[RowMap], blocks: Sequence[int]) -> RowMap:
        """Return the map of columns joined end to end; column i has `blocks[i]` blocks."""
        # The columns of a batch are joined one by one, with the same maps.
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
        # numpy pickles many times as fast as torch; int32 halves the message.
        return _unpickle_row_map, (self.block_ids.numpy().astype(np.int32), self.row_ids.numpy().astype(np.int32))


def _picker(kept: Sequence[int], blocks: int) -> BlockPicker:
    if len(kept) == blocks:
        return lambda all_blocks: all_blocks
    if len(kept) == 1:
        return lambda all_blocks: (all_blocks[kept[0]],)
    return itemgetter(*kept)  # in C: a batch may have thousands of blocks in each of many columns


def _unpickle_row_map(block_ids: np.ndarray, row_ids: np.ndarray) -> RowMap:
    return RowMap(torch.from_numpy(block_ids.astype(np.int64)), torch.from_numpy(row_ids.astype(np.int64)))


class RemoteColumn(Column):
    """A column by reference: row i is row `row_map.row_ids[i]` of `blocks[row_map.block_ids[i]]`.

    Its spec is known without its contents.
    """

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
        """Set the owner of the rows, and the counter of bytes fetched from them."""
        self.owner = owner
        for block in self.blocks:
            block.fetch_counter = counter

    def wait(self) -> None:
        """Wait until every block is computed, without fetching contents; raises the error of a call that failed."""
        unresolved = [block for block in self.blocks if block.must_resolve]
        if unresolved:
            unresolved[0].load(unresolved[1:])
            self._resolve()

    def _resolve(self) -> None:
        """Replace the blocks whose calls have ended by the blocks of the columns that these returned."""
        if self.row_map.is_whole and all(block.must_resolve and block.is_local for block in self.blocks):
            self._replace_blocks(cat_columns([block.column() for block in self.blocks]))
            return
        columns: list[Column] = []
        for number, block in enumerate(self.blocks):
            rows = self.row_map.row_ids[self.row_map.block_ids == number]
            if block.must_resolve and block.is_local:
                columns.append(block.column().take(_as_slice(rows)))
            else:
                columns.append(RemoteColumn(self._spec, [block], RowMap(torch.zeros_like(rows), rows)))
        # The columns are joined block by block; the inverse permutation restores the order of the rows.
        place = self.row_map.block_ids.argsort(stable=True).argsort()
        self._replace_blocks(cat_columns(columns).take(_as_slice(place)))

    def _replace_blocks(self, resolved: Column) -> None:
        """Take over the blocks and the row map of a column of the same contents."""
        if not isinstance(resolved, RemoteColumn):
            self._local = resolved
            resolved = RemoteColumn.of_block(self._spec, LocalBlock(resolved), len(resolved))
        self.blocks, self.row_map = resolved.blocks, resolved.row_map
        self._trim_blocks()

    def _trim_blocks(self) -> None:
        """Drop from mapped blocks the rows before the first and after the last used one."""
        if len(self) and all(block.is_mapped and not block.is_local for block in self.blocks):
            self.row_map, spans = self.row_map.spans(len(self.blocks))
            self.blocks = tuple(block.part(*span) for block, span in zip(self.blocks, spans, strict=True))

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return all(block.is_ready for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks; an estimate from the spec while some are not computed."""
        if not any(block.must_resolve for block in self.blocks):
            return sum(block.nbytes for block in self.blocks)
        return self._spec.estimated_bytes(len(self))

    def fetch(self) -> Column:
        """Return the column with its contents in this process. They are fetched once."""
        if self._local is None:
            self.wait()
        if self._local is None:
            self._local = self._fetch_rows()
        return self._local

    def _fetch_rows(self) -> Column:
        # All missing blocks in one request: each costs a round trip.
        away = [block for block in self.blocks if not block.is_local]
        if away:
            away[0].load(away[1:])
        if len(self.blocks) == 1:
            return self.blocks[0].column().take(_as_slice(self.row_map.row_ids))
        # Take all rows of a block at once, then bring the joined rows back into the column's order.
        order = self.row_map.block_ids.argsort(stable=True)
        counts = torch.bincount(self.row_map.block_ids, minlength=len(self.blocks)).tolist()
        by_block = self.row_map.row_ids[order].split(counts)
        parts = [block.column().take(_as_slice(rows)) for block, rows in zip(self.blocks, by_block, strict=True)]
        return parts[0].cat(parts[1:]).take(_as_slice(order.argsort()))

    def same_as(self, other: Column) -> bool:
        """Whether both are known to hold the same contents, without fetching either."""
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
        return self.fetch().view()

    def read(self) -> Value:
        return self.fetch().read()

    def row(self, row: int) -> Any:
        taken = self.take(slice(row, row + 1))
        return (taken.fetch() if isinstance(taken, RemoteColumn) else taken).row(0)

    def take(self, rows: Rows) -> Column:
        # A column that was merely fetched here keeps travelling by reference.
        if self._local is not None and all(isinstance(block, LocalBlock) for block in self.blocks):
            return self._local.take(rows)
        if isinstance(rows, slice) and rows == slice(0, len(self)):
            return self
        # The owner stays: the selected rows are still in its processes.
        row_map, pick = self.row_map.take(rows, len(self.blocks))
        return RemoteColumn(self._spec, pick(self.blocks), row_map, self.owner)

    def cat(self, others: Sequence[Column]) -> Column:
        return cat_columns([self, *others])

    def to(self, device: str | torch.device) -> Column:
        return self if str(device) == "cpu" and self._spec.device == "cpu" else self.fetch().to(device)

    def deepcopy(self) -> Column:
        return self.fetch().deepcopy()

    def __reduce__(self) -> tuple[Any, ...]:
        if any(block.must_resolve and block.is_local for block in self.blocks):
            self._resolve()  # small rows came with the reply, and are now pickled without a reference
        self._trim_blocks()
        blocks, row_map = list(self.blocks), self.row_map
        local = [number for number, block in enumerate(blocks) if isinstance(block, LocalBlock)]
        if local:
            rows = row_map.row_ids.clone()
            for number in local:  # of a local block only the used rows are pickled
                place = row_map.block_ids == number
                blocks[number] = LocalBlock(blocks[number].column().take(_as_slice(rows[place])))
                rows[place] = torch.arange(int(place.sum()))
            row_map = RowMap(row_map.block_ids, rows)
        return RemoteColumn, (self._spec, blocks, row_map)


def cat_columns(columns: Sequence[Column]) -> Column:
    """Return the rows of all columns, of equal spec, in order; by reference if any column is remote."""
    remote = [column for column in columns if isinstance(column, RemoteColumn)]
    if not remote:
        return columns[0].cat(columns[1:]) if len(columns) > 1 else columns[0]
    parts = [
        column
        if isinstance(column, RemoteColumn)
        else RemoteColumn.of_block(column.spec(), LocalBlock(column.immutable()), len(column))
        for column in columns
    ]
    row_map = RowMap.cat([part.row_map for part in parts], [len(part.blocks) for part in parts])
    blocks = list(itertools.chain.from_iterable(part.blocks for part in parts))
    return RemoteColumn(remote[0].spec(), blocks, row_map, remote[0].owner)


def owner_of(columns: Sequence[Column]) -> Owner | None:
    """Return the owner of the largest remote column, so that its rows need not move; None if no column is remote."""
    remote = [column for column in columns if isinstance(column, RemoteColumn) and column.owner is not None]
    return max(remote, key=lambda column: column.nbytes).owner if remote else None


def _as_slice(rows: Tensor) -> Rows:
    """Return consecutive row numbers as a slice, with which a column shares its storage; others unchanged."""
    if not len(rows):
        return slice(0, 0)
    first, end = int(rows[0]), int(rows[0]) + len(rows)
    return slice(first, end) if torch.equal(rows, torch.arange(first, end)) else rows
