"""DPPO: divergence proximal policy optimisation (arXiv 2602.04879), with the binary TV and KL divergences.

Groups, advantages A_i and the KL to a reference are GRPO's. Let mu be the policy that sampled, as the rollout engine
computed it (section 5.2: not recomputed), p = pi(y_it), q = mu(y_it) and r_it = p / q. The trust region is one of
probabilities, not of ratios: a token is left out if its update would move pi further away from mu, and pi is further
away than max_divergence (eq. 12):

    m_it = 0 if (A_i > 0 and r_it > 1 or A_i < 0 and r_it < 1) and D_it > max_divergence, else 1
    L    = - M[ m_it sg(min(r_it, ratio_cap)) A_i log pi(y_it) ]

with D_it the divergence of the two outcomes "this token" and "any other": |q - p| for divergence=tv (eq. 13), or
q log(q / p) + (1 - q) log((1 - q) / (1 - p)) for divergence=kl (eq. 14). sg(.) has no gradient, so a token's is
r_it A_i, as in the paper, up to the cap. The paper sums over tokens; M is the mean over those of the mini-batch. r_it
corrects for samples of another policy, so the run's own correction must be off: trainer.importance=off in runs with
trainer.rollouts_ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlcore_grpo import GRPO, GroupConfig
from torch import Tensor

from rlcore import AlgorithmSpec, Config, ConfigError, hookimpl, option
from rlcore.ops import Outputs, Term, needs, policy_terms

RLCORE_API = 1
ONE = 1 - 1e-6
"""The largest probability in a KL, whose other outcome would else have the logarithm of 0."""


@dataclass(frozen=True)
class DPPOConfig(GroupConfig):
    """Settings of DPPO."""

    divergence: Literal["tv", "kl"] = option("tv", "the binary divergence: total variation, or KL in nats")
    max_divergence: float = option(0.15, "divergence from the sampling policy from which tokens are left out", min=0.0)
    ratio_cap: float = option(20.0, "upper bound of a token's ratio as its weight", min=1.0)


def binary_divergence(log_probs: Tensor, rollout_log_probs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return D_it of the module's docstring, [...], from log-probs in nats; it has no gradient."""
    p, q = log_probs.detach().exp(), rollout_log_probs.exp()
    if kind == "tv":
        return (q - p).abs()
    p, q = p.clamp(max=ONE), q.clamp(max=ONE)
    return q * (q.log() - p.log()) + (1 - q) * ((1 - q).log() - (1 - p).log())


@needs("log_probs", "entropy")
def dppo_loss(out: Outputs, batch: Mapping[str, Any], config: DPPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    advantages, sampled = batch["advantages"][:, None], batch["rollout_log_probs"]
    ratio = out.ratio(sampled).detach()
    away = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    cut = away & (binary_divergence(out.log_probs, sampled, config.divergence) > config.max_divergence)
    loss = -ratio.clamp(max=config.ratio_cap) * advantages * out.log_probs * ~cut
    return policy_terms(
        out,
        batch,
        loss=loss,
        mean="token",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.kl_unbiased,
        clipped=cut,
    )


class DPPO(GRPO):
    """GRPO's step with DPPO's loss."""

    config_class = DPPOConfig
    loss = staticmethod(dppo_loss)

    def check(self, config: Config) -> None:
        """Raise ConfigError when the run corrects for samples of another policy, which the ratio does."""
        super().check(config)
        trainer = config.trainer
        if trainer.importance not in ("auto", "off") or (trainer.importance == "auto" and trainer.rollouts_ahead):
            raise ConfigError(
                f"trainer.importance={trainer.importance} with trainer.rollouts_ahead={trainer.rollouts_ahead} weighs "
                "samples of an older policy, and DPPO's own ratio does so too; set trainer.importance=off"
            )


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register DPPO."""
    return AlgorithmSpec("dppo", DPPO)
