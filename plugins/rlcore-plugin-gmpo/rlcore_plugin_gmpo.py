"""GMPO: geometric-mean policy optimisation (arXiv 2507.20673).

Groups, advantages A_i and the KL are GRPO's. Where GRPO takes the arithmetic mean of a response's clipped ratios, this
takes the geometric one (eq. 4), so that single large ratios weigh less. With x_it = log(pi(y_it) / pi_old(y_it)),

    L    = - mean_i A_i exp( 1/T_i sum_t c_i(x_it) )
    c_i(x) = min(x, clip_high) if A_i > 0, else max(x, -clip_low)

Each token is clipped before the mean, only on the side that its advantage pushes to, and in log space, at ratios of
exp(-clip_low) and exp(clip_high). The paper's bounds are 0.4 (section 4), wider than GRPO's. Responses without an
action do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rlcore_grpo import GRPO, GroupConfig

from rlcore import AlgorithmSpec, hookimpl, option
from rlcore.ops import Outputs, Term, needs, policy_terms, sequence_ratio

RLCORE_API = 1


@dataclass(frozen=True)
class GMPOConfig(GroupConfig):
    """Settings of GMPO."""

    clip_low: float = option(0.4, "a token's log-ratio is clipped at -clip_low", min=0.0)
    clip_high: float = option(0.4, "a token's log-ratio is clipped at clip_high", min=0.0)


@needs("log_probs", "entropy")
def gmpo_loss(out: Outputs, batch: Mapping[str, Any], config: GMPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask, advantages = batch["response_mask"], batch["advantages"][:, None]
    x = out.log_probs - batch["old_log_probs"]
    clipped = torch.where(advantages > 0, x.clamp(max=config.clip_high), x.clamp(min=-config.clip_low))
    loss = -advantages * sequence_ratio(clipped, mask, out.log_ratio_bound)[:, None]
    # The same number on each token of a response, whose mean is the response's term.
    return policy_terms(
        out,
        batch,
        loss=loss.expand(mask.shape),
        mean="sequence",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.kl_unbiased,
        clipped=clipped != x,
    )


class GMPO(GRPO):
    """GRPO's step with GMPO's loss."""

    config_class = GMPOConfig
    loss = staticmethod(gmpo_loss)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register GMPO."""
    return AlgorithmSpec("gmpo", GMPO)
