"""Padding a batch until a fixed number of workers divides its rows. rlcore's own dispatch modes need none."""

from __future__ import annotations

import torch

from rlcore.errors import DataError
from rlcore.protocol import DataProto
from rlcore.protocol.row_operations import check_count


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return the batch padded to a multiple of `size_divisor` rows, and the number of rows appended.

    The padding repeats the batch's first rows, several times if needed. A batch of no rows is returned unchanged.
    Raises DataError for a divisor below 1.
    """
    check_count("size_divisor", size_divisor, 1)
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    return data[torch.arange(len(data) + pad_size) % len(data)], pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last `pad_size` rows; DataError when it has fewer."""
    check_count("pad_size", pad_size, 0)
    if pad_size > len(data):
        raise DataError(f"cannot remove {pad_size} rows of padding from a batch of {len(data)} rows")
    return data[: len(data) - pad_size]
