"""Tensors as numpy arrays and back. Arrays pickle with their bytes out of band, without a copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

_NAMES = {torch.int64: "int64", torch.int32: "int32", torch.float32: "float32", torch.bool: "bool"}
"""Dtypes that numpy has too, and most columns have."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_array(tensor: Tensor) -> tuple[str, np.ndarray]:
    """Return a tensor's dtype name and its values as a contiguous CPU array (bfloat16 as int16, float8 as uint8)."""
    name = _NAMES.get(tensor.dtype)
    if name is not None and tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous():
        return name, tensor.numpy()  # most columns; each call below would cost as much again
    flat = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bfloat16 or name.startswith("float8"):
        # numpy has neither type, so the bits travel as integers.
        flat = flat.view(_SAME_SIZE[tensor.element_size()])
    return name, flat.numpy()


def from_array(name: str, array: np.ndarray) -> Tensor:
    """Return the tensor of an array from `to_array`, on the CPU, over the same memory.

    An object store's memory is read-only, and writing to a tensor over it crashes the process. Columns are immutable,
    so callers that write read a private copy first.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else _as_writable(array))
    dtype = getattr(torch, name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _as_writable(array: np.ndarray) -> np.ndarray:
    """Return an array over the same memory with its writeable flag set; torch warns of any other array."""
    if not array.nbytes:
        return array.copy()
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory._array = array  # type: ignore[attr-defined]  # keeps the memory alive
    return np.frombuffer(memoryview(memory), dtype=array.dtype).reshape(array.shape)
