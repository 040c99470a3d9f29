"""Advantages from scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def group_index(uid: Sequence[str] | np.ndarray) -> Tensor:
    """Return int64 [rows]: the number of each row's group, groups numbered in order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(str(u), len(numbers)) for u in uid], dtype=torch.int64)


def group_advantages(
    scores: Tensor, uid: Sequence[str] | np.ndarray, *, divide_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return each score's advantage over its group, fp32 [rows]: (score - mean) / (std + eps) within equal `uid`.

    `scores` is [rows]. The standard deviation is the unbiased one (0 for a group of one); a group whose scores are all
    equal gets exactly 0. `divide_by_std=False` leaves out the division. Sources: GRPO, arXiv 2402.03300, section 4.1;
    without the division: Dr. GRPO, arXiv 2503.20783. Raises ValueError when the lengths differ.
    """
    if scores.ndim != 1 or len(scores) != len(uid):
        raise ValueError(f"scores has shape {tuple(scores.shape)}, uid {len(uid)} rows; both must be one value per row")
    index = group_index(uid).to(scores.device)
    groups = int(index.max()) + 1 if len(index) else 0
    # In fp64: the mean of equal scores must give a difference of exactly 0, whatever the group's size.
    values = scores.double()
    count = torch.zeros(groups, dtype=torch.float64, device=scores.device).index_add_(0, index, torch.ones_like(values))
    mean = torch.zeros_like(count).index_add_(0, index, values) / count
    centred = values - mean[index]
    if divide_by_std:
        variance = torch.zeros_like(count).index_add_(0, index, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[index]
    return centred.float()
