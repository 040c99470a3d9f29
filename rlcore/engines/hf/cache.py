"""A key-value cache in one buffer per layer, from which rows are dropped in place while decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BufferedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, capacity, head size], filled from the left; reading gives the filled part.

    The buffers grow with what is in them, up to `limit` tokens, so that rows dropped early never take their whole room.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.rows, self.length = limit, 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the prompts' keys and values [rows, heads, tokens, head size] as the first buffers."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return all keys and values so far."""
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
        """Copy the given rows into buffers with room for half as many tokens again, and at least 64 more."""
        capacity = min(self.limit, self.length + max(64, self.length // 2))
        for name in ("keys", "values"):
            filled = getattr(self, name)[rows, :, : self.length]
            buffer = filled.new_empty((*filled.shape[:2], capacity, filled.shape[3]), dtype=dtype)
            buffer[:, :, : self.length] = filled
            setattr(self, name, buffer)

    def pick(self, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        """Make the rows those at the given indices, int64 [new rows], some of them more than once."""
        self._resize(rows, dtype)
        self.rows = len(rows)

    def drop(self, holes: Tensor, fillers: Tensor, rows: int) -> None:
        """Keep the first `rows` rows, once those at `fillers` stand at `holes` (int64, of one length)."""
        self.keys[holes, :, : self.length] = self.keys[fillers, :, : self.length]
        self.values[holes, :, : self.length] = self.values[fillers, :, : self.length]
        self.rows = rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset that a mask for `query_length` new tokens needs."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return how long a row can become."""
        return self.limit


class BufferedCache(Cache):
    """One BufferedLayer for each layer of the model."""

    def __init__(self, layers: int, limit: int) -> None:
        super().__init__(layers=[BufferedLayer(limit) for _ in range(layers)])

    def pick(self, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        """Make the rows those at the given indices, int64 [new rows], in every layer, held as `dtype`."""
        for layer in self.layers:
            layer.pick(rows, dtype)

    def drop(self, holes: Tensor, fillers: Tensor, rows: int) -> None:
        """Keep the first `rows` rows of every layer, once those at `fillers` stand at `holes`."""
        for layer in self.layers:
            layer.drop(holes, fillers, rows)
