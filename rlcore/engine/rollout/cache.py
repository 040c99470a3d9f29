"""A key-value cache in one buffer per layer, whose rows can be picked while decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BufferedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, capacity, head size], filled from the left; reading gives the filled part."""

    is_compileable = False
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the buffers' shape from the first keys and values."""
        self.keys = key_states.new_zeros((*key_states.shape[:2], self.capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((*value_states.shape[:2], self.capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def pick(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows, int64 [new rows]."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((len(rows), *old.shape[1:]))
            torch.index_select(old[:, :, : self.length], 0, rows, out=new[:, :, : self.length])
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset that a mask for `query_length` new tokens needs."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return the buffer's length."""
        return self.capacity


class BufferedCache(Cache):
    """One BufferedLayer for each layer of the model."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[BufferedLayer(capacity) for _ in range(layers)])

    def pick(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows in every layer."""
        for layer in self.layers:
            layer.pick(rows)
