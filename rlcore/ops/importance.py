"""Importance weights for off-policy samples, and the difference between the sampling and the trained policy.

The sampling policy b differs from the trained policy pi when its weights are older, when the two engines round
differently, or when one engine is wrong. All functions take the log-probs of the same sampled tokens under both
policies, in nats, [rows, tokens], and a mask of that shape that is nonzero on the tokens to count.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from rlcore.ops.kl import kl_estimate
from rlcore.ops.masked import masked_mean, masked_sum
from rlcore.ops.ratio import LOG_RATIO_BOUND, bounded_ratio

Correction = Literal["token", "sequence", "mask", "sequence_mask"]

MASKS: tuple[Correction, ...] = ("mask", "sequence_mask")
"""The corrections that leave out what is outside a band."""


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    kind: Correction,
    *,
    cap: float = math.inf,
    band: tuple[float, float] = (0.0, math.inf),
    bound: float = LOG_RATIO_BOUND,
) -> Tensor:
    """Return the weight of each token [rows, tokens], without a gradient; 1 where the mask is 0.

    With r_t = pi(y_t) / b(y_t) and R = prod_t r_t, the weight is,

        token            min(r_t, cap), as rho in V-trace (IMPALA, arXiv 1802.01561, section 4.1)
        sequence         min(R, cap) on every token of the row
        mask             r_t if it is inside `band`, ends included, else 0 (IcePop, arXiv 2510.18855)
        sequence_mask    R on every token of the row if it is inside `band`, else 0 (TRL's mode of that name)

    log r_t and log R are clamped to [-bound, bound] before exp; 0: they are not. Raises ValueError for another kind.
    """
    inside = mask.bool()
    log_ratio = torch.where(inside, log_probs.detach() - rollout_log_probs, 0.0)
    if kind not in get_args(Correction):
        raise ValueError(f"unknown correction {kind!r}; allowed: {', '.join(get_args(Correction))}")
    if kind in ("sequence", "sequence_mask"):
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    ratio = bounded_ratio(log_ratio, bound)
    if kind in MASKS:
        low, high = band
        # NaN is inside no band, and must not become a weight of 0.
        weights = torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    else:
        weights = ratio.clamp(max=cap)
    return torch.where(inside, weights, 1.0)


def sequence_ratio(log_ratios: Tensor, mask: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """Return the geometric mean of each row's ratios, [rows], 1 where the mask is empty: exp(mean_t log_ratios_t).

    `log_ratios` [rows, tokens] are log(pi(y_t) / pi_old(y_t)), and keep their gradient. Their mean is clamped to
    [-bound, bound] before exp; 0: it is not. Source: GSPO, arXiv 2507.18071, eq. 7.
    """
    return bounded_ratio(masked_mean(log_ratios, mask, dim=-1), bound)


def train_rollout_logprob_diff(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    bound: float,
    *,
    log_ratio_bound: float = LOG_RATIO_BOUND,
) -> dict[str, Tensor]:
    """Return the difference of the two policies' log-probs, in nats, as sums over the counted tokens.

    `difference`: sum of |log pi - log b|. `kl`: sum of the k3 estimate of KL(b || pi), never negative, with log-ratios
    bounded by `log_ratio_bound` as in `kl_estimate`. `beyond`: number of tokens with a difference above `bound`.
    `tokens`: number of counted tokens. `max`: the largest difference.
    """
    inside = mask.bool()
    difference = torch.where(inside, (log_probs.detach() - rollout_log_probs).abs(), 0.0)
    return {
        "difference": difference.sum(),
        "kl": masked_sum(kl_estimate(rollout_log_probs, log_probs.detach(), "k3", log_ratio_bound), inside),
        "beyond": (difference > bound).sum(),
        "tokens": inside.sum(),
        "max": difference.max() if difference.numel() else difference.new_zeros(()),
    }
