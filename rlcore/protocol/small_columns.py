"""Small columns encoded into one byte string. Pickling a dozen small arrays one by one takes many times as long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from rlcore.protocol.buffers import from_array, to_array
from rlcore.protocol.columns import Column, DenseColumn, RaggedColumn
from rlcore.protocol.ragged import Ragged, ragged_of_arrays

SMALL_BYTES = 64_000
"""Larger columns are pickled one by one, so that their bytes are not copied."""
ALIGNMENT = 8
"""Each array starts at a multiple of this many bytes, as int64 and float64 require."""

EncodedColumns: TypeAlias = tuple[list[tuple[str, str, list[tuple[str, tuple[int, ...], int]]]], bytearray]
"""Columns, and the bytes of all their arrays. A column is its name, its dtype and its arrays.

An array is numpy's dtype, its shape and its first byte. A dense column has one array, a ragged one values and offsets.
"""


def is_small(column: Column) -> bool:
    """Whether a column is a tensor in this process, on the CPU, of at most SMALL_BYTES."""
    if not isinstance(column, (DenseColumn, RaggedColumn)):
        return False
    value = column.view()
    return value.nbytes <= SMALL_BYTES and value.device.type == "cpu"


def encode_columns(columns: Mapping[str, Column]) -> EncodedColumns:
    """Return small columns encoded for `decode_columns`."""
    entries, pieces, end = [], [], 0
    for name, column in columns.items():
        value = column.view()
        dtype, *arrays = value.arrays() if isinstance(value, Ragged) else to_array(torch.as_tensor(value))
        placed = []
        for array in arrays:
            placed.append((array.dtype.str, array.shape, end))
            # The padding aligns the next array.
            pieces += [array.tobytes(), bytes(-array.nbytes % ALIGNMENT)]
            end += len(pieces[-2]) + len(pieces[-1])
        entries.append((name, dtype, placed))
    # A bytearray, unlike bytes, is writable after unpickling; torch warns of read-only memory.
    return entries, bytearray().join(pieces)


def decode_columns(small: EncodedColumns) -> dict[str, Column]:
    """Return the columns of `encode_columns`; they share the memory of the encoded bytes."""
    entries, buffer = small
    columns: dict[str, Column] = {}
    for name, dtype, placed in entries:
        arrays = [np.ndarray(shape, kind, buffer, start) for kind, shape, start in placed]
        columns[name] = (
            DenseColumn(from_array(dtype, arrays[0]))
            if len(arrays) == 1
            else RaggedColumn(ragged_of_arrays(dtype, *arrays))
        )
    return columns
