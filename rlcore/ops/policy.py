"""The terms of the policy losses that vary GRPO's: a loss of each token, the KL to a reference, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from rlcore.ops.kl import KLEstimator, kl_estimate
from rlcore.ops.loss import Outputs, Term, metric, objective
from rlcore.ops.masked import masked_mean, masked_sum

LossMean = Literal["token", "sequence", "sum"]


def policy_terms(
    out: Outputs,
    batch: Mapping[str, Any],
    *,
    loss: Tensor,
    mean: LossMean,
    kl_coef: float,
    kl_estimator: KLEstimator,
    kl_unbiased: bool,
    **metrics: Tensor,
) -> dict[str, Term]:
    """Return `policy`, the mean of `loss` [rows, tokens], the KL if it has a weight, and metrics.

    mean: `token`, over all tokens with response_mask 1; `sequence`, over the responses that have such a token, of each
    one's mean; `sum`, over those responses, of each one's sum.
    kl_coef: the KL's weight, 0 for none. kl_estimator: that of `kl_estimate`. kl_unbiased: multiply a token's KL by its
    ratio to `old_log_probs`, with the gradient through both (arXiv 2512.02556, eq. 7).
    metrics: [rows, tokens] each, reported as means over tokens; beside them `entropy` in nats, and `kl_old`, the k3
    estimate of KL(pi_old || pi). Reads `response_mask`, `old_log_probs`, and for the KL `ref_log_probs`.
    """
    mask, old, bound = batch["response_mask"], batch["old_log_probs"], out.log_ratio_bound
    measured = {"entropy": out.entropy, **metrics, "kl_old": kl_estimate(old, out.log_probs, "k3", bound)}
    terms = {"policy": _mean(loss, mask, mean)}
    if kl_coef > 0:
        kl = kl_estimate(out.log_probs, batch["ref_log_probs"], kl_estimator, bound)
        terms["kl"] = _mean(kl * out.ratio(old) if kl_unbiased else kl, mask, mean, kl_coef)
    return terms | {name: metric(masked_sum(values.float(), mask), mask.sum()) for name, values in measured.items()}


def _mean(values: Tensor, mask: Tensor, mean: LossMean, weight: float = 1.0) -> Term:
    if mean == "token":
        return objective(masked_sum(values, mask), mask.sum(), weight)
    total = masked_mean(values, mask, dim=-1).sum() if mean == "sequence" else masked_sum(values, mask)
    return objective(total, mask.any(-1).sum(), weight)
