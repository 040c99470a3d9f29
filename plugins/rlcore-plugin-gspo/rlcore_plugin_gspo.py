"""GSPO: group sequence policy optimisation (arXiv 2507.18071), and LUSPO (arXiv 2602.05261).

Groups, advantages A_i and the KL are GRPO's. The ratio is that of a whole response y_i with T_i actions (eq. 7), the
geometric mean of its tokens' ratios, and a response is clipped as a whole (eq. 5):

    s_i = exp( 1/T_i sum_t log(pi(y_it) / pi_old(y_it)) )
    L   = - mean_i [ min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) ]

A single token moves s_i by a T_i-th part of its own log-ratio, so the bounds are much narrower than GRPO's (3e-4 and
4e-4, section 5.1). With one advantage per response, GSPO-token (eq. 13) has the same gradient. luspo=true multiplies
the term of response i by T_i, without which a token's gradient falls with 1/T_i. Responses without an action do not
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore_grpo import GRPO, GroupConfig

from rlcore import AlgorithmSpec, hookimpl, option
from rlcore.ops import Outputs, Term, clipped_surrogate, needs, policy_terms, sequence_ratio

RLCORE_API = 1


@dataclass(frozen=True)
class GSPOConfig(GroupConfig):
    """Settings of GSPO."""

    clip_low: float = option(3e-4, "a response's ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(4e-4, "a response's ratio is clipped at 1 + clip_high", min=0.0)
    luspo: bool = option(False, "multiply each response's term by its number of tokens (LUSPO)")


@needs("log_probs", "entropy")
def gspo_loss(out: Outputs, batch: Mapping[str, Any], config: GSPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    ratio = sequence_ratio(out.log_probs - batch["old_log_probs"], mask, out.log_ratio_bound)
    surrogate, clipped = clipped_surrogate(ratio, batch["advantages"], config.clip_low, config.clip_high)
    # The same number on each token of a response: their mean is the response's term, and their sum T_i times it.
    loss, cut = (-surrogate[:, None]).expand(mask.shape), clipped[:, None].expand(mask.shape)
    return policy_terms(
        out,
        batch,
        loss=loss,
        mean="sum" if config.luspo else "sequence",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.kl_unbiased,
        clipped=cut,
    )


class GSPO(GRPO):
    """GRPO's step with GSPO's loss."""

    config_class = GSPOConfig
    loss = staticmethod(gspo_loss)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register GSPO."""
    return AlgorithmSpec("gspo", GSPO)
