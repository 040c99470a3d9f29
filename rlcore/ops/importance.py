"""Importance weights for off-policy samples, and the difference between the sampling and the trained policy.

The sampling policy b differs from the trained policy pi when its weights are older, when the two engines round
differently, or when one engine is wrong. All functions take the log-probs of the same sampled tokens under both
policies, in nats, [rows, tokens], and a mask of that shape that is nonzero on the tokens to count.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.ops.kl import kl_estimate
from rlcore.ops.masked import masked_mean, masked_sum

Correction = Literal["token", "sequence", "mask"]


def importance_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, kind: Correction, *, cap: float, floor: float = 0.0
) -> Tensor:
    """Return the weight of each token [rows, tokens], without a gradient; 1 where the mask is 0.

    With r_t = pi(y_t) / b(y_t), the weight is, for `token`, min(r_t, cap), as rho in V-trace (IMPALA, arXiv 1802.01561,
    section 4.1); for `sequence`, min(prod_t r_t, cap) on every token of the row; for `mask`, 1 if floor <= r_t <= cap,
    else 0 (IcePop, arXiv 2510.18855). Raises ValueError for another kind.
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


def sequence_ratio(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return the geometric mean of each row's ratios, [rows], 1 where the mask is empty: exp(mean_t log_ratios_t).

    `log_ratios` [rows, tokens] are log(pi(y_t) / pi_old(y_t)), and keep their gradient. Source: GSPO, arXiv 2507.18071,
    eq. 7.
    """
    return masked_mean(log_ratios, mask, dim=-1).exp()


def train_rollout_logprob_diff(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, bound: float
) -> dict[str, Tensor]:
    """Return the difference of the two policies' log-probs, in nats, as sums over the counted tokens.

    `difference`: sum of |log pi - log b|. `kl`: sum of the k3 estimate of KL(b || pi), never negative. `beyond`: number
    of tokens with a difference above `bound`. `tokens`: number of counted tokens. `max`: the largest difference.
    """
    inside = mask.bool()
    difference = torch.where(inside, (log_probs.detach() - rollout_log_probs).abs(), 0.0)
    return {
        "difference": difference.sum(),
        "kl": masked_sum(kl_estimate(rollout_log_probs, log_probs.detach(), "k3"), inside),
        "beyond": (difference > bound).sum(),
        "tokens": inside.sum(),
        "max": difference.max() if difference.numel() else difference.new_zeros(()),
    }
