"""VESPO: variational sequence-level soft policy optimisation (arXiv 2602.10693).

Groups, advantages A_i and the KL are GRPO's, without a division by the standard deviation. Let mu be the policy that
sampled, as the rollout engine computed it: it may be older than pi, and rounded differently. A response's weight is a
function of its whole ratio, the product over its tokens, without a gradient, sg(.) (eq. 20):

    W_i    = prod_t pi(y_it) / mu(y_it)
    phi(W) = W^c1 exp(c2 (1 - W))                  (c1, c2) = (c1_pos, c2_pos) if A_i >= 0, else (c1_neg, c2_neg)
    L      = - M[ sg(phi(W_i)) A_i log pi(y_it) ]

with the mean M over all tokens of the mini-batch. phi(1) = 1, and phi falls smoothly to 0 for W far below and far above
1: a response is damped as a whole, and nothing is clipped. As phi corrects for samples of another policy, the run's own
correction must be off: trainer.importance=off in runs with trainer.rollouts_ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rlcore_grpo import GRPO, GroupConfig

from rlcore import AlgorithmSpec, Config, ConfigError, hookimpl, option
from rlcore.ops import Outputs, Term, masked_sum, needs, policy_terms

RLCORE_API = 1


@dataclass(frozen=True)
class VESPOConfig(GroupConfig):
    """Settings of VESPO."""

    divide_by_std: bool = option(False, "divide advantages by the group's standard deviation")
    c1_pos: float = option(2.0, "c1 where the advantage is not negative: damping of W < 1", min=0.0)
    c2_pos: float = option(3.0, "c2 where the advantage is not negative: damping of W > 1", min=0.0)
    c1_neg: float = option(3.0, "c1 where the advantage is negative", min=0.0)
    c2_neg: float = option(2.0, "c2 where the advantage is negative", min=0.0)


@needs("log_probs", "entropy")
def vespo_loss(out: Outputs, batch: Mapping[str, Any], config: VESPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored.

    The metric `phi` is the mean over tokens of their response's phi(W_i).
    """
    mask, advantages = batch["response_mask"], batch["advantages"][:, None]
    bound = out.log_ratio_bound or math.inf
    log_w = masked_sum(out.log_probs.detach() - batch["rollout_log_probs"], mask, dim=-1)[:, None]
    good = advantages >= 0
    c1 = torch.where(good, config.c1_pos, config.c1_neg)
    c2 = torch.where(good, config.c2_pos, config.c2_neg)
    # In log space, and bounded from above only: far below 1 phi is 0.
    log_w = log_w.clamp(max=bound)
    phi = (c1 * log_w + c2 * (1 - log_w.exp())).clamp(max=bound).exp()
    return policy_terms(
        out,
        batch,
        loss=-phi * advantages * out.log_probs,
        mean="token",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.kl_unbiased,
        phi=phi.expand(mask.shape),
    )


class VESPO(GRPO):
    """GRPO's step with VESPO's loss."""

    config_class = VESPOConfig
    loss = staticmethod(vespo_loss)

    def check(self, config: Config) -> None:
        """Raise ConfigError when the run corrects for samples of another policy, which phi does."""
        super().check(config)
        trainer = config.trainer
        if trainer.importance not in ("auto", "off") or (trainer.importance == "auto" and trainer.rollouts_ahead):
            raise ConfigError(
                f"trainer.importance={trainer.importance} with trainer.rollouts_ahead={trainer.rollouts_ahead} weighs "
                "samples of an older policy, and VESPO's own weight does so too; set trainer.importance=off"
            )


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register VESPO."""
    return AlgorithmSpec("vespo", VESPO)
