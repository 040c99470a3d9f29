"""A key-value cache in one buffer per layer: rows leave it in place while others decode, and new rows join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BufferedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, columns, head size]; reading gives the filled columns.

    All rows end at the same column; a shorter row starts at a later one. The buffers grow with their contents, up to
    `limit` columns, so that rows that end early never take the memory of a full-length row.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.rows, self.length = limit, 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Use the prompts' keys and values [rows, heads, tokens, head size] as the first buffers."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new columns and return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rows, self.length = len(key_states), key_states.shape[2]
            return key_states, value_states
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._resize(slice(0, self.rows))
        self.keys[: self.rows, :, self.length : end] = key_states
        self.values[: self.rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]

    def _resize(self, rows: Tensor | slice, dtype: torch.dtype | None = None) -> None:
        """Copy the given rows into larger buffers."""
        for name in ("keys", "values"):
            filled = getattr(self, name)[rows, :, : self.length]
            buffer = filled.new_empty((*filled.shape[:2], self._capacity(self.length), filled.shape[3]), dtype=dtype)
            buffer[:, :, : self.length] = filled
            setattr(self, name, buffer)

    def _capacity(self, length: int) -> int:
        """Return the columns of new buffers: 1.5 times the filled ones, at least 64 more, at most `limit`."""
        return min(self.limit, length + max(64, length // 2))

    def select(self, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        """Replace the rows by those at the given indices, int64 [new rows]; an index may occur more than once."""
        self._resize(rows, dtype)
        self.rows = len(rows)

    def drop(self, holes: Tensor, fillers: Tensor, rows: int) -> None:
        """Keep the first `rows` rows, after the rows at `fillers` have moved to `holes` (int64, equally long)."""
        # Moved within the buffers: a selection would copy every row.
        self.keys[holes, :, : self.length] = self.keys[fillers, :, : self.length]
        self.values[holes, :, : self.length] = self.values[fillers, :, : self.length]
        self.rows = rows

    def join(self, other: BufferedLayer, length: int, limit: int) -> None:
        """Append the rows of another layer; all rows then end at column `length`.

        Own rows move by `length - self.length` columns; columns moved below 0 are dropped. Columns before a row's first
        hold zeros, so that a masked column adds nothing to attention. Buffers with enough room are kept.
        """
        rows, moves = self.rows + other.rows, length != self.length
        self.limit = limit
        for name in ("keys", "values"):
            own, joining = getattr(self, name), getattr(other, name)[: other.rows, :, : other.length]
            buffer = own
            if moves or rows > len(own) or length > own.shape[2]:
                buffer = own.new_empty((rows, own.shape[1], self._capacity(length), own.shape[3]))
                _put(buffer[: self.rows], own[: self.rows, :, : self.length], length)
                setattr(self, name, buffer)
            _put(buffer[self.rows : rows], joining, length)
        self.rows, self.length = rows, length

    def fill(self, rows: Sequence[tuple[Tensor, Tensor]], columns: int, room: int) -> None:
        """Begin with these rows' keys and values, [heads, any number up to `columns`, head size] each.

        Each row ends at column `columns`; the columns before its first hold zeros. `room`: columns after the next
        update.
        """
        for name, parts in zip(("keys", "values"), zip(*rows, strict=True), strict=True):
            heads, _, size = parts[0].shape
            buffer = parts[0].new_empty(len(rows), heads, self._capacity(room), size)
            for row, part in enumerate(parts):
                _put(buffer[row : row + 1], part[None], columns)
            setattr(self, name, buffer)
        self.is_initialized, self.rows, self.length = True, len(rows), columns

    def row(self, index: int, start: int) -> tuple[Tensor, Tensor]:
        """Return a copy of a row's keys and values from column `start` on, [heads, columns, head size] each."""
        keys, values = (each[index, :, start : self.length].clone() for each in (self.keys, self.values))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset that a mask for `query_length` new tokens needs."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of filled columns."""
        return self.length

    def get_max_length(self) -> int:
        """Return the largest number of columns of a row."""
        return self.limit


def _put(rows: Tensor, filled: Tensor, length: int) -> None:
    """Copy `filled` [rows, heads, columns, head size] into `rows`, to end at column `length`, with zeros before it."""
    filled = filled[:, :, max(0, filled.shape[2] - length) :]
    start = length - filled.shape[2]
    rows[:, :, :start] = 0
    rows[:, :, start:length] = filled


class BufferedCache(Cache):
    """One BufferedLayer for each layer of the model."""

    layers: list[BufferedLayer]

    def __init__(self, layers: int, limit: int) -> None:
        super().__init__(layers=[BufferedLayer(limit) for _ in range(layers)])

    def select(self, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        """Replace the rows by those at the given indices, int64 [new rows], in every layer, held as `dtype`."""
        for layer in self.layers:
            layer.select(rows, dtype)

    def drop(self, holes: Tensor, fillers: Tensor, rows: int) -> None:
        """Keep the first `rows` rows of every layer, after those at `fillers` have moved to `holes`."""
        for layer in self.layers:
            layer.drop(holes, fillers, rows)

    def join(self, other: BufferedCache, length: int, limit: int) -> None:
        """Append the rows of another cache, layer by layer, whose buffers are released; see BufferedLayer.join."""
        for layer, joining in zip(self.layers, other.layers, strict=True):
            layer.join(joining, length, limit)
            del joining.keys, joining.values
