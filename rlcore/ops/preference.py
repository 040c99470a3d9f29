"""Losses of preference pairs, on the difference of two responses' log-ratios to a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlcore.ops.loss import Term, metric, objective
from rlcore.ops.masked import masked_sum

PairLoss = Literal["sigmoid", "ipo", "hinge", "robust"]

ROUNDING = 1e-4
"""Nats: a difference below this, as before the first update, is a tie and counts as half accurate."""


def pair_loss(difference: Tensor, kind: PairLoss, beta: float, label_smoothing: float) -> Tensor:
    """Return each pair's loss, [pairs], of the chosen response's log-ratio minus the rejected one's, [pairs], in nats.

    With D the difference and e = `label_smoothing`, the assumed share of wrong preferences below 0.5,

        sigmoid   f(D) = -log sigmoid(beta D)        DPO, arXiv 2305.18290, equation 7
        ipo       f(D) = (D - 1 / (2 beta))^2        IPO, arXiv 2310.12036, equation 17
        hinge     f(D) = max(0, 1 - beta D)          SLiC-HF, arXiv 2305.10425, on log-ratios
                  (1 - e) f(D) + e f(-D)             for these three
        robust    ((1 - e) f(D) - e f(-D)) / (1 - 2 e), with f of sigmoid: unbiased for such a share,
                                                     arXiv 2403.00409, equation 12
    """

    def f(d: Tensor) -> Tensor:
        if kind == "ipo":
            return (d - 1 / (2 * beta)).square()
        return (1 - beta * d).clamp(min=0) if kind == "hinge" else -logsigmoid(beta * d)

    if label_smoothing == 0:
        return f(difference)
    right, wrong = (1 - label_smoothing) * f(difference), label_smoothing * f(-difference)
    return (right - wrong) / (1 - 2 * label_smoothing) if kind == "robust" else right + wrong


def preference_terms(
    log_probs: Tensor,
    batch: Mapping[str, Any],
    pair: Tensor,
    side: Tensor,
    *,
    kind: PairLoss,
    beta: float,
    label_smoothing: float,
) -> dict[str, Term]:
    """Return `preference`, the mean of `pair_loss` over pairs, and metrics of the pairs.

    `log_probs` [rows, tokens] of the policy, in nats; `batch` holds `response_mask` and `ref_log_probs`. Rows with
    equal `pair` int64 [rows] form a pair, in any order; `side` fp32 [rows] is 1 for the chosen and -1 for the rejected
    row. beta times a row's log-ratio is its implicit reward: `margin` is the mean difference of a pair's, `accuracy`
    the share of pairs with a positive one.
    """
    ratio = masked_sum(log_probs - batch["ref_log_probs"], batch["response_mask"], dim=-1)
    numbers, place = pair.unique(return_inverse=True)
    difference = ratio.new_zeros(len(numbers)).index_add(0, place, side * ratio)
    count, reward = (side > 0).sum(), beta * ratio
    return {
        "preference": objective(pair_loss(difference, kind, beta, label_smoothing).sum(), count),
        "margin": metric(beta * difference.sum(), count),
        "accuracy": metric(((difference > ROUNDING).sum() + (difference > -ROUNDING).sum()) / 2, count),
        "chosen_reward": metric(reward[side > 0].sum(), count),
        "rejected_reward": metric(reward[side < 0].sum(), count),
    }
