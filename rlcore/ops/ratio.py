"""Ratios of probabilities, from log-ratios that are bounded before exp.

exp of a log-ratio above 88 is infinite in fp32, and the gradient of a minimum or a clip behind it is 0 * inf = NaN.
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Nats: the default of `trainer.log_ratio_bound`."""


def bound_log_ratio(log_ratio: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """Return log-ratios [...], in nats, clamped to [-bound, bound]; 0: unchanged. NaN stays NaN.

    A value inside the bound keeps every bit of itself and of its gradient; outside, the gradient is 0.
    """
    return log_ratio.clamp(-bound, bound) if bound else log_ratio


def bounded_ratio(log_ratio: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """Return exp of log-ratios [...] that `bound_log_ratio` has bounded."""
    return bound_log_ratio(log_ratio, bound).exp()
