"""The operations of a DataProto that select, repeat, reorder and split rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.columns import Column, DenseColumn, RaggedColumn, Value, column_of
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.rows import Index, select_rows
from rlcore.protocol.table import Table

Slice: TypeAlias = slice


class RowOperations(ABC):
    """The row operations of a batch. Each returns new batches, which share storage with this one where possible."""

    __slots__ = ()

    @property
    @abstractmethod
    def table(self) -> Table:
        """The batch's columns and meta_info."""

    @classmethod
    @abstractmethod
    def _of(cls, source: Table) -> Self: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def chunk(self, chunks: int, uneven: bool = False) -> list[Self]:
        """Return `chunks` consecutive parts of equal size.

        With `uneven=True` sizes may differ by one, larger ones first, down to zero rows if there are fewer rows than
        chunks. Without it, raises DataError for a row count that `chunks` does not divide.
        """
        check_count("chunks", chunks, 1)
        size, rest = divmod(len(self), chunks)
        if rest and not uneven:
            raise DataError(
                f"{len(self)} rows cannot be split into {chunks} equal chunks; pass uneven=True for unequal ones"
            )
        return self.split([size + (part < rest) for part in range(chunks)])

    def split(self, split_size: int | Sequence[int], uneven: bool = False) -> list[Self]:
        """Return consecutive parts of `split_size` rows each, or of the listed sizes.

        With `uneven=True` the last part may be smaller. Raises DataError for other row counts that `split_size` does
        not divide, and for listed sizes that do not add up to the rows.
        """
        rows = len(self)
        if isinstance(split_size, (int, np.integer)):
            check_count("split_size", split_size, 1)
            if rows % split_size and not uneven:
                raise DataError(
                    f"{rows} rows cannot be split into parts of {split_size}; pass uneven=True for a smaller last part"
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
        """Return row i `repeat_times[i]` times, in order; DataError unless there is one count >= 0 per row."""
        times = torch.as_tensor(repeat_times).cpu()
        # torch makes an empty list a float tensor.
        whole = not len(times) or not (times.is_floating_point() or times.dtype == torch.bool)
        if times.shape != (len(self),) or not whole or bool((times < 0).any()):
            raise DataError(
                f"repeat_times must have one count >= 0 for each of the {len(self)} rows, got {times.tolist()}"
            )
        return self._of(self.table.take(torch.arange(len(self)).repeat_interleave(times.to(torch.int64))))

    def reorder(self, indices: Index) -> Self:
        """Return the batch with row `indices[i]` at position i; DataError unless `indices` names every row once."""
        rows = select_rows(indices, len(self))
        order = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if not torch.equal(order.sort().values, torch.arange(len(self))):
            raise DataError(
                f"reorder needs each of the {len(self)} rows once, got {order.tolist()}; batch[indices] can drop rows"
            )
        return self._of(self.table.take(order))

    def select_idxs(self, idxs: Index) -> Self:
        """Return the selected rows, like `batch[idxs]`."""
        return self._of(self.table.take(select_rows(idxs, len(self))))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows `start:end:step`."""
        return self._of(self.table.take(select_rows(Slice(start, end, step), len(self))))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Return each row as `n_split` rows, each with a consecutive part of the columns `split_keys`.

        The other columns are repeated. Dense columns are split along their second dimension, ragged columns and
        sequences in object columns along their length. Raises DataError for a missing column, and for one that does
        not split into equal parts.
        """
        check_count("n_split", n_split, 1)
        table = self.table
        for name in split_keys or ():
            table.column(name)
        unfolded = table.take(torch.arange(len(self)).repeat_interleave(n_split))
        for name in split_keys or ():
            unfolded.columns[name] = _unfold(name, table.column(name).view(), n_split)
        return self._of(unfolded)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        uneven: bool = False,
    ) -> Iterator[Self]:
        """Yield the mini-batches of `epochs` passes over the rows.

        `dataloader_kwargs` may hold `shuffle` (a new order in each epoch, drawn from `seed`) and `drop_last`. If
        `mini_batch_size` does not divide the rows, `drop_last` drops the last, smaller mini-batch and `uneven=True`
        keeps it. Raises DataError without either, for other options, and for `shuffle` without a seed.
        """
        check_count("mini_batch_size", mini_batch_size, 1)
        check_count("epochs", epochs, 0)
        options = dict(dataloader_kwargs or {})
        shuffle, drop_last = bool(options.pop("shuffle", False)), bool(options.pop("drop_last", False))
        if options:
            raise DataError(
                f"make_iterator has no dataloader_kwargs {list(options)}; allowed are shuffle and drop_last"
            )
        if shuffle and seed is None:
            raise DataError("make_iterator needs a seed to shuffle; pass seed=")
        if len(self) % mini_batch_size and not (drop_last or uneven):
            raise DataError(
                f"{len(self)} rows cannot be split into mini-batches of {mini_batch_size}; pass uneven=True for a "
                'smaller last one, or dataloader_kwargs={"drop_last": True}'
            )
        used = len(self) - len(self) % mini_batch_size if drop_last else len(self)
        # A generator of its own: the order must not depend on other draws in the process.
        generator = torch.Generator().manual_seed(seed or 0)

        # A nested generator, so that the checks above run at the call and not at the first iteration.
        def mini_batches() -> Iterator[Self]:
            for _ in range(epochs):
                order = torch.randperm(len(self), generator=generator) if shuffle else torch.arange(len(self))
                for start in range(0, used, mini_batch_size):
                    yield self._of(self.table.take(order[start : min(start + mini_batch_size, used)]))

        return mini_batches()


def check_count(name: str, value: int, least: int) -> None:
    """Raise DataError naming the argument unless `value` is an integer of at least `least`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise DataError(f"{name} must be an integer >= {least}, got {value!r}")


def _unfold(name: str, value: Value, parts: int) -> Column:
    """Return the column `name` with each row split into `parts` equal rows; DataError if a row does not split."""
    problem = f"column {name!r} cannot be unfolded into {parts} equal parts"
    if isinstance(value, Tensor):
        shape = value.shape
        if len(shape) < 2 or shape[1] % parts:
            raise DataError(f"{problem}: its shape is {list(shape)}, and {parts} must divide the second dimension")
        return DenseColumn(value.reshape(shape[0] * parts, shape[1] // parts, *shape[2:]))
    if isinstance(value, Ragged):
        uneven = (value.lengths % parts).nonzero().flatten().tolist()
        if uneven:
            raise DataError(f"{problem}: row {uneven[0]} has {int(value.lengths[uneven[0]])} values")
        return RaggedColumn(Ragged.from_lengths(value.values, (value.lengths // parts).repeat_interleave(parts)))
    pieces: list[Any] = []
    for row, items in enumerate(value):
        if not isinstance(items, (list, tuple, np.ndarray)) or len(items) % parts:
            raise DataError(f"{problem}: row {row} is not a sequence of a multiple of {parts} items: {items!r:.80}")
        size = len(items) // parts
        pieces += [items[part * size : (part + 1) * size] for part in range(parts)]
    return column_of(name, pieces)
