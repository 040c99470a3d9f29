"""Small columns as one run of bytes: to pickle a dozen small arrays one by one costs many times what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from rlcore.protocol.buffers import from_array, to_array
from rlcore.protocol.columns import Column, DenseColumn, RaggedColumn
from rlcore.protocol.ragged import Ragged, ragged_of_arrays

SMALL_BYTES = 64_000
"""A column of more bytes is pickled by itself, so that its bytes are not copied."""
ALIGNMENT = 8
"""Each array begins at a multiple of so many bytes, as its numbers ask for."""

EncodedColumns: TypeAlias = tuple[list[tuple[str, str, list[tuple[str, tuple[int, ...], int]]]], bytearray]
"""Of each column its name and dtype, and of each of its arrays numpy's dtype, the shape and its first byte; the bytes.

A dense column has one array, its values; a ragged one has its values and its offsets.
"""


def is_small(column: Column) -> bool:
    """Whether a column's numbers are here, on the CPU, and few."""
    if not isinstance(column, (DenseColumn, RaggedColumn)):
        return False
    value = column.view()
    return value.nbytes <= SMALL_BYTES and value.device.type == "cpu"


def encode_columns(columns: Mapping[str, Column]) -> EncodedColumns:
    """Return small columns as what `decode_columns` takes."""
    entries, pieces, end = [], [], 0
    for name, column in columns.items():
        value = column.view()
        dtype, *arrays = value.arrays() if isinstance(value, Ragged) else to_array(torch.as_tensor(value))
        placed = []
        for array in arrays:
            placed.append((array.dtype.str, array.shape, end))
            pieces += [array.tobytes(), bytes(-array.nbytes % ALIGNMENT)]
            end += len(pieces[-2]) + len(pieces[-1])
        entries.append((name, dtype, placed))
    return entries, bytearray().join(pieces)


def decode_columns(small: EncodedColumns) -> dict[str, Column]:
    """Return the columns, which share the memory of the packed bytes."""
    entries, packed = small
    columns: dict[str, Column] = {}
    for name, dtype, placed in entries:
        arrays = [np.ndarray(shape, kind, packed, start) for kind, shape, start in placed]
        columns[name] = (
            DenseColumn(from_array(dtype, arrays[0]))
            if len(arrays) == 1
            else RaggedColumn(ragged_of_arrays(dtype, *arrays))
        )
    return columns
