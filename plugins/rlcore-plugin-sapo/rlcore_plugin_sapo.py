"""SAPO: soft adaptive policy optimisation (arXiv 2511.20347).

Groups, advantages A_i and the KL are GRPO's. In place of PPO's clip, a sigmoid of the ratio r_it = pi(y_it) /
pi_old(y_it) takes a token's gradient away the more the further r_it is from 1 (eq. 5 and 6):

    L    = - mean_i 1/T_i sum_t f_i(r_it) A_i
    f_i(r) = 4/tau sigmoid(tau (r - 1))        with tau = tau_pos if A_i > 0, else tau_neg

The gradient of token t is that of r_it A_i times 4 p (1 - p) with p = sigmoid(tau (r_it - 1)): 1 at r_it = 1, for any
tau. A larger tau_neg damps tokens of bad responses sooner, whose gradient raises all other tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rlcore_grpo import GRPO, GroupConfig

from rlcore import AlgorithmSpec, hookimpl, option
from rlcore.ops import Outputs, Term, needs, policy_terms

RLCORE_API = 1


@dataclass(frozen=True)
class SAPOConfig(GroupConfig):
    """Settings of SAPO."""

    tau_pos: float = option(1.0, "steepness of the gate where the advantage is positive", min=1e-3)
    tau_neg: float = option(1.05, "steepness of the gate where it is negative", min=1e-3)


@needs("log_probs", "entropy")
def sapo_loss(out: Outputs, batch: Mapping[str, Any], config: SAPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored.

    The metric `gate` is the mean of 4 p (1 - p).
    """
    advantages = batch["advantages"][:, None]
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg)
    ratio = out.ratio(batch["old_log_probs"])
    p = (tau * (ratio - 1)).sigmoid()
    return policy_terms(
        out,
        batch,
        loss=-4 / tau * p * advantages,
        mean="sequence",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.kl_unbiased,
        gate=4 * p * (1 - p),
    )


class SAPO(GRPO):
    """GRPO's step with SAPO's loss."""

    config_class = SAPOConfig
    loss = staticmethod(sapo_loss)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register SAPO."""
    return AlgorithmSpec("sapo", SAPO)
