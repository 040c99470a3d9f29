"""The operations of a DataProto that choose, repeat, order and cut rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.rows import Index, select_rows
from rlcore.protocol.table import Table

Slice: TypeAlias = slice


class RowOperations(ABC):
    """What a batch does with its rows. Every operation returns new batches, which share what storage they can."""

    __slots__ = ()

    @property
    @abstractmethod
    def table(self) -> Table:
        """The columns themselves."""

    @classmethod
    @abstractmethod
    def _of(cls, source: Table) -> Self: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def chunk(self, chunks: int, uneven: bool = False) -> list[Self]:
        """Return `chunks` consecutive parts of equal size.

        Sizes that differ by one (larger first, and of zero rows when rows are fewer) come only with `uneven=True`;
        otherwise a row count that `chunks` does not divide is a DataError.
        """
        check_count("chunks", chunks, 1)
        size, rest = divmod(len(self), chunks)
        if rest and not uneven:
            raise DataError(
                f"{len(self)} rows cannot be cut into {chunks} equal chunks; pass uneven=True for unequal ones"
            )
        return self.split([size + (part < rest) for part in range(chunks)])

    def split(self, split_size: int | Sequence[int], uneven: bool = False) -> list[Self]:
        """Return consecutive parts of `split_size` rows, or of the sizes listed, which add up to the rows.

        A smaller last part comes only with `uneven=True`; otherwise rows that do not divide are a DataError.
        """
        rows = len(self)
        if isinstance(split_size, (int, np.integer)):
            check_count("split_size", split_size, 1)
            if rows % split_size and not uneven:
                raise DataError(
                    f"{rows} rows cannot be cut into parts of {split_size}; pass uneven=True for a smaller last"
                )
            sizes = [min(split_size, rows - start) for start in range(0, rows, split_size)]
        else:
            sizes = list(split_size)
        if sum(sizes) != rows or any(size < 0 for size in sizes):
            raise DataError(f"the sizes of the parts are {sizes}; they must be >= 0 and add up to the {rows} rows")
        starts = np.cumsum([0, *sizes]).tolist()
        runs = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        return [self._of(part) for part in self.table.split(runs)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return every row `repeat_times` times: a a b b when interleaved, else a b a b."""
        check_count("repeat_times", repeat_times, 0)
        rows = torch.arange(len(self))
        return self._of(
            self.table.take(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))
        )

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> Self:
        """Return row i `repeat_times[i]` times, in order; DataError unless there is one count >= 0 for each row."""
        times = torch.as_tensor(repeat_times).cpu()
        whole = not len(times) or not (times.is_floating_point() or times.dtype == torch.bool)
        if times.shape != (len(self),) or not whole or bool((times < 0).any()):
            raise DataError(f"repeat_times has one count >= 0 for each of the {len(self)} rows, got {times.tolist()}")
        return self._of(self.table.take(torch.arange(len(self)).repeat_interleave(times.to(torch.int64))))

    def reorder(self, indices: Index) -> Self:
        """Return the batch with row `indices[i]` as its row i; DataError unless `indices` names every row once."""
        rows = select_rows(indices, len(self))
        order = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if not torch.equal(order.sort().values, torch.arange(len(self))):
            raise DataError(
                f"reorder takes each of the {len(self)} rows once, got {order.tolist()}; index to leave rows out"
            )
        return self._of(self.table.take(order))

    def select_idxs(self, idxs: Index) -> Self:
        """Return the selected rows, like `batch[idxs]`."""
        return self._of(self.table.take(select_rows(idxs, len(self))))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows `start:end:step`."""
        return self._of(self.table.take(select_rows(Slice(start, end, step), len(self))))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Return each row as `n_split` rows: of the columns `split_keys` a consecutive part, of the others a copy.

        Dense columns are cut along their second dimension, ragged ones along their length, sequences in object columns
        likewise. Raises DataError for a missing column or one that cannot be cut into equal parts.
        """
        check_count("n_split", n_split, 1)
        table = self.table
        for name in split_keys or ():
            table.column(name)
        repeated = torch.arange(len(self)).repeat_interleave(n_split)
        unfolded = Table(meta_info=dict(table.meta_info))
        for name, column in table.columns.items():
            try:
                part = column.unfold(n_split) if name in (split_keys or ()) else column.take(repeated)
            except DataError as error:
                raise DataError(f"column {name!r} cannot be unfolded: {error}") from None
            unfolded.columns[name] = part
        return self._of(unfolded)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        uneven: bool = False,
    ) -> Iterator[Self]:
        """Give the mini-batches of `epochs` passes over the rows.

        `dataloader_kwargs` takes `shuffle` (another order each epoch, drawn from `seed`) and `drop_last`.
        Rows that `mini_batch_size` does not divide are a DataError unless the last, smaller mini-batch is dropped, or
        wanted by `uneven=True`.
        """
        check_count("mini_batch_size", mini_batch_size, 1)
        check_count("epochs", epochs, 0)
        options = dict(dataloader_kwargs or {})
        shuffle, drop_last = bool(options.pop("shuffle", False)), bool(options.pop("drop_last", False))
        if options:
            raise DataError(
                f"make_iterator knows the dataloader_kwargs shuffle and drop_last, got also {list(options)}"
            )
        if shuffle and seed is None:
            raise DataError("make_iterator shuffles by a seed; pass seed=")
        if len(self) % mini_batch_size and not (drop_last or uneven):
            raise DataError(
                f"{len(self)} rows cannot be cut into mini-batches of {mini_batch_size}; pass uneven=True for a "
                'smaller last one, or dataloader_kwargs={"drop_last": True}'
            )
        used = len(self) - len(self) % mini_batch_size if drop_last else len(self)
        generator = torch.Generator().manual_seed(seed or 0)

        def mini_batches() -> Iterator[Self]:
            for _ in range(epochs):
                order = torch.randperm(len(self), generator=generator) if shuffle else torch.arange(len(self))
                for start in range(0, used, mini_batch_size):
                    yield self._of(self.table.take(order[start : min(start + mini_batch_size, used)]))

        return mini_batches()


def check_count(what: str, value: int, least: int) -> None:
    """Raise DataError unless `value` is an integer of at least `least`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise DataError(f"{what} must be an integer >= {least}, got {value!r}")
