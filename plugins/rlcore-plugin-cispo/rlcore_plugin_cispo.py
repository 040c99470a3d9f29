"""CISPO: clipped importance-sampling weights (MiniMax-M1, arXiv 2506.13585).

Groups, advantages A_i and the KL are GRPO's. The ratio r_it = pi(y_it) / pi_old(y_it) is clipped as a weight without a
gradient, sg(.), so that each token keeps its gradient, also where PPO's clip would take it away (eq. 4 and 5):

    L = - M[ sg(clip(r_it, low, high)) A_i log pi(y_it) ]

where M is the mean over all tokens of the mini-batch. Systems write the bounds in two ways, which `bounds` names:

    absolute    low = clip_low        high = clip_high           ScaleRL (arXiv 2510.13786), TRL, Tinker
    relative    low = 1 - clip_low    high = 1 + clip_high       the paper, verl

The paper has no lower bound: clip_low is 0 here (in the relative form, 1). ScaleRL finds little difference between the
upper bounds 4, 5 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlcore_grpo import GRPO, GroupConfig

from rlcore import AlgorithmSpec, Config, ConfigError, hookimpl, option
from rlcore.ops import Outputs, Term, needs, policy_terms

RLCORE_API = 1


@dataclass(frozen=True)
class CISPOConfig(GroupConfig):
    """Settings of CISPO."""

    bounds: Literal["absolute", "relative"] = option("absolute", "clip at clip_low, clip_high or 1 -+ those")
    clip_low: float = option(0.0, "lower bound of the weight, as `bounds` says", min=0.0)
    clip_high: float = option(5.0, "upper bound of the weight, as `bounds` says", min=0.0)

    @property
    def weights(self) -> tuple[float, float]:
        """The smallest and the largest weight of a token."""
        if self.bounds == "absolute":
            return self.clip_low, self.clip_high
        return 1 - self.clip_low, 1 + self.clip_high


@needs("log_probs", "entropy")
def cispo_loss(out: Outputs, batch: Mapping[str, Any], config: CISPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    ratio = out.ratio(batch["old_log_probs"]).detach()
    weight = ratio.clamp(*config.weights)
    loss = -weight * batch["advantages"][:, None] * out.log_probs
    return policy_terms(
        out,
        batch,
        loss=loss,
        mean="token",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.kl_unbiased,
        clipped=weight != ratio,
    )


class CISPO(GRPO):
    """GRPO's step with CISPO's loss."""

    config_class = CISPOConfig
    config: CISPOConfig
    loss = staticmethod(cispo_loss)

    def check(self, config: Config) -> None:
        """Raise ConfigError for bounds that do not hold the ratio 1, such as those meant the other way."""
        super().check(config)
        low, high = self.config.weights
        if not low <= 1 <= high:
            raise ConfigError(
                f"algo.bounds={self.config.bounds} with algo.clip_low={self.config.clip_low} and algo.clip_high="
                f"{self.config.clip_high} clips weights to {low} to {high}, which must hold 1, the weight of an "
                "unchanged token; bounds=absolute takes them as they are, bounds=relative as distances from 1"
            )


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register CISPO."""
    return AlgorithmSpec("cispo", CISPO)
