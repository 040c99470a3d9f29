"""The terms of policy losses: a loss of each token, the KL to a reference, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from rlcore.ops.kl import kl_estimate
from rlcore.ops.loss import Outputs, Term, metric, objective
from rlcore.ops.masked import masked_mean, masked_sum

LossMean = Literal["token", "sequence", "constant"]


def policy_terms(
    out: Outputs, batch: Mapping[str, Any], config: Any, loss: Tensor, mean: LossMean, budget: Any = None, **by: Tensor
) -> dict[str, Term]:
    """Return `policy`, the mean of `loss` [rows, tokens], the KL if it has a weight, and metrics.

    mean: `token`, over all tokens with response_mask 1; `sequence`, over the responses that have such a token, of each
    one's mean; `constant`, the sum over those tokens divided by the sum of `budget` [rows].
    config: `kl_coef` is the KL's weight, 0 for none; `kl_estimator` is that of `kl_estimate`; `kl_unbiased` multiplies
    a token's KL by its ratio to `old_log_probs`, with the gradient through both (arXiv 2512.02556, eq. 7).
    Metrics, means over tokens: those of `by` [rows, tokens] under their names; `entropy` in nats; `kl_old`, the k3
    estimate of KL(pi_old || pi). Reads `response_mask`, `old_log_probs`, and for the KL `ref_log_probs`.
    """
    mask, old, bound = batch["response_mask"], batch["old_log_probs"], out.log_ratio_bound
    measured = {"entropy": out.entropy, **by, "kl_old": kl_estimate(old, out.log_probs, "k3", bound)}
    metrics = {name: metric(masked_sum(values.float(), mask), mask.sum()) for name, values in measured.items()}
    terms = {"policy": objective(*_total_and_count(loss, mask, mean, budget)), **metrics}
    if config.kl_coef > 0:
        kl = kl_estimate(out.log_probs, batch["ref_log_probs"], config.kl_estimator, bound)
        kl = kl * out.ratio(old) if config.kl_unbiased else kl
        terms["kl"] = objective(*_total_and_count(kl, mask, mean, budget), weight=config.kl_coef)
    return terms


def _total_and_count(values: Tensor, mask: Tensor, mean: LossMean, budget: Any) -> tuple[Tensor, Tensor]:
    if mean == "sequence":
        return masked_mean(values, mask, dim=-1).sum(), mask.any(-1).sum()
    return masked_sum(values, mask), mask.sum() if mean == "token" else budget.sum()
