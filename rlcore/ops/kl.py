"""Estimators of KL(policy || reference) from the log-probs of tokens sampled by the policy.

Source: J. Schulman, "Approximating KL Divergence", 2020 (http://joschu.net/blog/kl-approx.html); k3 is the one used by
GRPO (arXiv 2402.03300, eq. 4).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.ops.ratio import LOG_RATIO_BOUND, bound_log_ratio

KLEstimator = Literal["k1", "k2", "k3"]

K3_BOUND = 10.0
"""Nats: the most that k3 says of a token, where log-ratios are bounded."""


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator = "k3", bound: float = LOG_RATIO_BOUND
) -> Tensor:
    """Return the per-token KL estimate [...], in nats, of log-probs [...] against reference log-probs [...].

    With r = log_probs - ref_log_probs: k1 = r (unbiased, may be negative), k2 = r^2 / 2 (biased, non-negative),
    k3 = exp(-r) - 1 + r (unbiased, non-negative). Of k3, r is clamped to [-bound, bound] before exp, and the result to
    at most K3_BOUND, without a gradient beyond; `bound` 0: neither. Raises ValueError for another kind.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        difference = bound_log_ratio(difference, bound)
        estimate = torch.expm1(-difference) + difference
        return estimate.clamp(max=K3_BOUND) if bound else estimate
    raise ValueError(f"unknown KL estimator {kind!r}; allowed: k1, k2, k3")


def adapt_kl_coef(coef: float, kl: float, target: float, *, gain: float = 0.1) -> float:
    """Return the next weight of a KL penalty: higher if `kl` is above `target`, lower if it is below.

    The result is coef * (1 + gain * e) with the relative error e = kl / target - 1, clipped to [-0.2, 0.2]. `kl` and
    `target` are in the same unit (in the source, nats per response). Source: arXiv 1909.08593, section 2.2, with gain
    0.1. Raises ValueError for a target that is not positive.
    """
    if target <= 0:
        raise ValueError(f"the KL target is {target}; it must be above 0")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + gain * error)
