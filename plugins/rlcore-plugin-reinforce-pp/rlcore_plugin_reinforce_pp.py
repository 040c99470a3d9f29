"""REINFORCE++ (arXiv 2501.03262), and its form with a group's baseline.

A response's actions are its tokens t = 1..T with response_mask 1; other tokens are skipped. With the score s_i of
response i, the return of an action has the KL to the reference in it, estimated by k1 (eq. 4):

    A_it = gamma^(T-t) s_i - kl_coef sum_{u >= t} gamma^(u-t) log(pi_old(y_iu) / pi_ref(y_iu))

With baseline=group, s_i is the score minus its group's mean (eq. 6), and the KL is a term of the loss, estimated by k2
(eq. 8): of k1, k2 and k3 the one whose gradient, as a loss, is the reverse KL's. In both forms the advantages are then
normalised over all actions of the batch, not in a group (eq. 5 and 7), and the policy minimises PPO's loss, with r_it =
pi(y_it) / pi_old(y_it) and the mean M over the actions of the mini-batch:

    N_it = (A_it - mean(A)) / (std(A) + 1e-8)
    L    = - M[ min(r_it N_it, clip(r_it, 1 - clip_low, 1 + clip_high) N_it) ] (+ kl_coef M[ log(pi / pi_ref)^2 / 2 ])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from rlcore_grpo import GRPO

from rlcore import AlgorithmSpec, Config, ConfigError, DataProto, Ragged, Run, hookimpl, option
from rlcore.ops import (
    KLEstimator,
    Outputs,
    Term,
    episodes,
    gae,
    group_advantages,
    kl_estimate,
    masked_sum,
    metric,
    needs,
    objective,
)

RLCORE_API = 1


@dataclass(frozen=True)
class ReinforcePPConfig:
    """Settings of REINFORCE++."""

    baseline: Literal["none", "group"] = option("none", "subtract nothing from a score, or its group's mean")
    group_size: int = option(1, "responses per prompt; at least 2 for baseline=group", min=1)
    gamma: float = option(1.0, "discount per token", min=0.0, max=1.0)
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", min=0.0)
    kl_coef: float = option(0.01, "weight of the KL, in the returns or for baseline=group in the loss", min=0.0)
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)

    kl_estimator: ClassVar[KLEstimator] = "k2"  # in the loss


def token_returns(batch: DataProto, *, kl_coef: float, gamma: float) -> dict[str, Ragged]:
    """Return `reinforce_pp_returns`, A_it of the module's docstring; 0 on tokens with response_mask 0.

    Reads `reinforce_pp_scores` [rows] and `response_mask`; if kl_coef is not 0, `old_log_probs` and `ref_log_probs`.
    """
    lengths = batch.view("response_mask").lengths
    mask = batch.view("response_mask").to_padded().bool()
    last = (mask.flip(1).cumsum(1).flip(1) == 1) & mask
    rewards = torch.where(last, batch.view("reinforce_pp_scores")[:, None], 0.0)
    if kl_coef:
        old, ref = (batch.view(name).to_padded() for name in ("old_log_probs", "ref_log_probs"))
        rewards = rewards - kl_coef * kl_estimate(old, ref, "k1")
    # With values of 0 and lambda 1, the estimate is the return itself.
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return {"reinforce_pp_returns": Ragged.from_padded(returns, lengths)}


def shift_and_scale(batch: DataProto, *, mean: float, std: float) -> dict[str, Ragged]:
    """Return `advantages`: (reinforce_pp_returns - mean) / std, and 0 on tokens with response_mask 0."""
    returns, acts = batch.view("reinforce_pp_returns"), batch.view("response_mask").values.bool()
    return {"advantages": returns.with_values(torch.where(acts, (returns.values - mean) / std, 0.0))}


@needs("log_probs", "entropy")
def reinforce_pp_loss(out: Outputs, batch: Mapping[str, Any], config: ReinforcePPConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask, old = batch["response_mask"], batch["old_log_probs"]
    gain, clipped = out.clipped_surrogate(old, batch["advantages"], config.clip_low, config.clip_high)
    terms = {
        "policy": objective(-masked_sum(gain, mask), mask.sum()),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
        "clipped": metric(masked_sum(clipped.float(), mask), mask.sum()),
        "kl_old": metric(masked_sum(kl_estimate(old, out.log_probs, "k3", out.log_ratio_bound), mask), mask.sum()),
    }
    if config.kl_coef > 0:
        kl = masked_sum(kl_estimate(out.log_probs, batch["ref_log_probs"], config.kl_estimator), mask)
        in_loss = config.baseline == "group"
        terms["kl"] = objective(kl, mask.sum(), config.kl_coef) if in_loss else metric(kl, mask.sum())
    return terms


class ReinforcePP(GRPO):
    """GRPO's step with REINFORCE++'s advantages and loss."""

    config_class = ReinforcePPConfig
    config: ReinforcePPConfig
    loss = staticmethod(reinforce_pp_loss)

    def __init__(self, config: ReinforcePPConfig) -> None:
        super().__init__(config)
        self.compares_samples = config.baseline == "group"

    def check(self, config: Config) -> None:
        """Raise ConfigError for a baseline without a group."""
        super().check(config)
        if self.config.baseline == "group" and self.config.group_size < 2:
            raise ConfigError(
                f"algo.baseline=group with algo.group_size={self.config.group_size} makes every advantage 0; set "
                "algo.group_size to 2 or more"
            )

    def with_advantages(self, run: Run, batch: DataProto) -> DataProto:
        """Return the batch with `advantages`, one for each token, computed where the rows are."""
        grouped, scores = self.config.baseline == "group", batch["scores"]
        if grouped:
            scores = group_advantages(scores, batch["uid"], divide_by_std=False, episode=episodes(batch))
        batch["reinforce_pp_scores"] = scores
        kl_coef = 0.0 if grouped else self.config.kl_coef
        reads = ["reinforce_pp_scores", "response_mask", *(["old_log_probs", "ref_log_probs"] if kl_coef else [])]
        batch = batch.union(batch.map(partial(token_returns, kl_coef=kl_coef, gamma=self.config.gamma), reads=reads))
        moments = batch.masked_moments("reinforce_pp_returns", "response_mask", per_episode=True)
        mean, std = (moments.mean, moments.var**0.5 + 1e-8) if moments.count else (0.0, 1.0)
        to_scale = partial(shift_and_scale, mean=mean, std=std)
        return batch.union(batch.map(to_scale, reads=["reinforce_pp_returns", "response_mask"]))


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register REINFORCE++."""
    return AlgorithmSpec("reinforce_pp", ReinforcePP)
