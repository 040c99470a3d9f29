"""Importance weights for samples of a policy that is not quite the one that is trained, and how far apart the two are.

The sampling policy b differs from the trained one pi where weights are older, where the two engines round differently,
or where one of them is wrong. All functions take the log-probs of the same sampled tokens under both, in nats,
[rows, tokens], and a mask of the same shape that is not zero on the tokens that count.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.ops.kl import kl_estimate
from rlcore.ops.masked import masked_sum

Correction = Literal["token", "sequence", "mask"]


def importance_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, kind: Correction, *, cap: float, floor: float = 0.0
) -> Tensor:
    """Return the weight of each token [rows, tokens], 1 where the mask is 0; no gradient passes through it.

    With r_t = pi(y_t) / b(y_t): `token` min(r_t, cap), as rho in V-trace (IMPALA, arXiv 1802.01561, section 4.1);
    `sequence` min(prod_t r_t, cap) for every token of the row; `mask` 1 for floor <= r_t <= cap and 0 outside that band
    (IcePop, arXiv 2510.18855). Raises ValueError for another kind.
    """
    inside = mask.bool()
    log_ratio = torch.where(inside, log_probs.detach() - rollout_log_probs, 0.0)
    if kind == "token":
        weights = log_ratio.exp().clamp(max=cap)
    elif kind == "sequence":
        weights = log_ratio.sum(-1, keepdim=True).exp().clamp(max=cap).expand_as(log_ratio)
    elif kind == "mask":
        ratio = log_ratio.exp()
        weights = ((ratio >= floor) & (ratio <= cap)).to(log_ratio.dtype)
    else:
        raise ValueError(f"unknown correction {kind!r}; allowed: token, sequence, mask")
    return torch.where(inside, weights, 1.0)


def train_rollout_logprob_diff(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, bound: float
) -> dict[str, Tensor]:
    """Return how far the log-probs of the same tokens are apart, as sums over the tokens that count.

    `difference`: of |log pi - log b|; `kl`: of the k3 estimate of KL(b || pi), which is not negative; `beyond`: number
    of tokens that differ by more than `bound`; `tokens`: their number; and `most`, the largest difference.
    """
    inside = mask.bool()
    apart = torch.where(inside, (log_probs.detach() - rollout_log_probs).abs(), 0.0)
    return {
        "difference": apart.sum(),
        "kl": masked_sum(kl_estimate(rollout_log_probs, log_probs.detach(), "k3"), inside),
        "beyond": (apart > bound).sum(),
        "tokens": inside.sum(),
        "most": apart.max() if apart.numel() else apart.new_zeros(()),
    }
