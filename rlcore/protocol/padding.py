"""Padding a batch with rows of its own, so that a fixed number of workers divides it."""

from __future__ import annotations

import torch

from rlcore.errors import DataError
from rlcore.protocol.dataproto import DataProto
from rlcore.protocol.row_operations import check_count


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return `data` with its first rows appended (again and again if need be) up to a multiple of `size_divisor`.

    Returns also how many rows were appended. A batch of no rows stays as it is, and 0 divides by all.
    """
    check_count("size_divisor", size_divisor, 1)
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    return data[torch.arange(len(data) + pad_size) % len(data)], pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return `data` without its last `pad_size` rows; DataError when it has fewer."""
    check_count("pad_size", pad_size, 0)
    if pad_size > len(data):
        raise DataError(f"cannot take {pad_size} rows of padding off a batch of {len(data)} rows")
    return data[: len(data) - pad_size]
