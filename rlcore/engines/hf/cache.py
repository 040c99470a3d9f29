"""A cache in one buffer per layer, or one state: rows leave it in place while others decode, and new rows join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)


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

    def release(self) -> None:
        """Give the memory back."""
        del self.keys, self.values

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


class StateLayer(LinearAttentionLayer):
    """The states of a layer with a convolution or a recurrence: of each row one, whatever its length.

    Padding on the left leaves them as they are, since such layers read zeros for masked tokens.
    """

    def __init__(self, states: int) -> None:
        super().__init__(number_of_states=states)

    def _change(self, change: Callable[[Tensor, dict[int, Any], int], Tensor], other: StateLayer | None = None) -> None:
        """Replace each state, [rows, ...], by `change(state, states of the other layer, their key)`."""
        for name in ("conv_states", "recurrent_states"):
            states, others = getattr(self, name), {} if other is None else getattr(other, name)
            states.update({key: change(state, others, key) for key, state in states.items() if state is not None})

    def select(self, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        """See BufferedLayer; `dtype` is for keys and values."""
        self._change(lambda state, *_: state.index_select(0, rows))

    def drop(self, holes: Tensor, fillers: Tensor, rows: int) -> None:
        """See BufferedLayer."""

        def moved(state: Tensor, *_: Any) -> Tensor:
            state[holes] = state[fillers]
            return state[:rows]

        self._change(moved)

    def join(self, other: StateLayer, length: int, limit: int) -> None:
        """Append the rows of another layer."""
        self._change(lambda state, others, key: torch.cat([state, others[key]]), other)

    def release(self) -> None:
        """Give the memory back."""
        self._change(lambda state, *_: state[:0].clone())


class StateAndBufferedLayer(StateLayer, BufferedLayer):
    """A layer with both: attention beside a convolution or a recurrence, as in Falcon-H1."""

    def __init__(self, limit: int, states: int) -> None:
        BufferedLayer.__init__(self, limit)
        StateLayer.__init__(self, states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Begin with keys and values, or with states, which transformers gives by name."""
        if keys_and_values:
            BufferedLayer.lazy_initialization(self, *keys_and_values)
        else:
            StateLayer.lazy_initialization(self, **states)

    def select(self, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        """See BufferedLayer."""
        StateLayer.select(self, rows)
        BufferedLayer.select(self, rows, dtype)

    def drop(self, holes: Tensor, fillers: Tensor, rows: int) -> None:
        """See BufferedLayer."""
        StateLayer.drop(self, holes, fillers, rows)
        BufferedLayer.drop(self, holes, fillers, rows)

    def join(self, other: StateAndBufferedLayer, length: int, limit: int) -> None:  # type: ignore[override]
        """See BufferedLayer."""
        StateLayer.join(self, other, length, limit)
        BufferedLayer.join(self, other, length, limit)

    def release(self) -> None:
        """Give the memory back."""
        StateLayer.release(self)
        BufferedLayer.release(self)


class BufferedCache(Cache):
    """One layer for each of the model: keys and values, states, or both."""

    layers: list[Any]

    def __init__(self, layers: int, limit: int) -> None:
        """`layers` of keys and values, with at most `limit` columns."""
        super().__init__(layers=[BufferedLayer(limit) for _ in range(layers)])

    @classmethod
    def of(cls, config: Any, limit: int) -> BufferedCache:
        """Return an empty cache for a model, by its transformers config: each layer of its own kind."""
        config = config.get_text_config()
        cache = cls(config.num_hidden_layers, limit)
        kinds, options = get_layer_types_and_kwargs(config)
        for index, (kind, own) in enumerate(zip(kinds, options, strict=True)):
            theirs, states = DYNAMIC_LAYER_TYPE_MAPPING[kind], own.get("number_of_states", 1)
            if issubclass(theirs, LinearAttentionLayer):
                has_keys = issubclass(theirs, CacheLayerMixin)
                cache.layers[index] = StateAndBufferedLayer(limit, states) if has_keys else StateLayer(states)
        return cache

    @property
    def keeps_rows(self) -> bool:
        """Whether an ended row can be continued from any of its tokens: a state is of its last token only."""
        return not any(isinstance(layer, StateLayer) for layer in self.layers)

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
            joining.release()
