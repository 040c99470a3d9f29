"""Sums and means under a mask. All inputs are padded tensors with a 0/1 mask of the same shape."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of `values` [...] where `mask` [...] is not 0; masked-out values may be any number, even nan."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of `values` [...] where `mask` [...] is not 0, and 0 where the mask is empty."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
