"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783).

For each prompt, G responses are sampled from the current policy pi_old and scored. With scores s_1..s_G of one prompt,

    A_i = (s_i - mean(s)) / (std(s) + 1e-6)                      (divide_by_std=false leaves out the division)

and with the ratio r_it = pi(y_it) / pi_old(y_it) of token t of response i, the policy minimises

    L   = - M[ min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) ] + kl_coef M[ KL_it ]

where KL_it estimates KL(pi || pi_ref) from the sampled token (k1, k2 or k3; kl_coef=0: no reference is started) and
M is the mean over all tokens of the mini-batch (loss_mean=token), the mean over responses of each response's own mean
(loss_mean=sequence, the paper's form), or the sum over all tokens divided by responses times rollout.response_len
(loss_mean=constant), a divisor that does not depend on the responses' lengths. Dr. GRPO: divide_by_std=false,
loss_mean=constant, kl_coef=0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataProto, Role, Run, hookimpl, option
from rlcore.ops import Outputs, Term, group_advantages, kl_estimate, masked_mean, masked_sum, metric, needs, objective

RLCORE_API = 1


@dataclass(frozen=True)
class GRPOConfig:
    """Settings of GRPO."""

    group_size: int = option(8, "responses per prompt", min=2)
    divide_by_std: bool = option(True, "divide advantages by the group's standard deviation")
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", min=0.0)
    kl_coef: float = option(0.001, "weight of the KL to the frozen reference; 0: no reference", min=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "how the KL is estimated from the sampled tokens")
    loss_mean: Literal["token", "sequence", "constant"] = option(
        "token", "mean over tokens, or over responses of their token means, or of their token sums / response_len"
    )
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


@needs("log_probs", "entropy")
def grpo_loss(out: Outputs, batch: Mapping[str, Any], config: GRPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    advantages = batch["advantages"][:, None]
    surrogate, clipped = out.clipped_surrogate(batch["old_log_probs"], advantages, config.clip_low, config.clip_high)

    terms = {
        "policy": objective(*total_and_count(-surrogate, batch, config)),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
        "clipped": metric(masked_sum(clipped.float(), mask), mask.sum()),
        "kl_old": metric(masked_sum(kl_estimate(batch["old_log_probs"], out.log_probs, "k3"), mask), mask.sum()),
    }
    if config.kl_coef > 0:
        kl = kl_estimate(out.log_probs, batch["ref_log_probs"], config.kl_estimator)
        terms["kl"] = objective(*total_and_count(kl, batch, config), weight=config.kl_coef)
    return terms


def total_and_count(values: Tensor, batch: Mapping[str, Any], config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Return M of `values` [rows, tokens] as a sum and a count."""
    mask = batch["response_mask"]
    if config.loss_mean == "sequence":
        return masked_mean(values, mask, dim=-1).sum(), mask.any(-1).sum()
    count = mask.sum() if config.loss_mean == "token" else batch["grpo_budget"].sum()
    return masked_sum(values, mask), count


class GRPO(Algorithm):
    """One step: sample groups, score them, compare within each group, update the actor."""

    config_class = GRPOConfig
    config: GRPOConfig

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, and the frozen reference if the KL is used."""
        actor = {"actor": Role(trains=True, generates=True)}
        return {**actor, "ref": Role()} if self.config.kl_coef > 0 else actor

    def check(self, config: Config) -> None:
        """Raise ConfigError when a step has fewer prompts than mini-batches: some mini-batches would be empty."""
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} groups; make it at most {config.data.batch_size}"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = run.actor.generate(prompts.repeat(self.config.group_size))
        batch = batch.union(run.reward(batch))
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        if self.config.kl_coef > 0:
            batch = batch.union(run.ref.log_probs(batch, name="ref_log_probs"))
        batch["advantages"] = group_advantages(batch["scores"], batch["uid"], divide_by_std=self.config.divide_by_std)
        if self.config.loss_mean == "constant":
            batch["grpo_budget"] = torch.full((len(batch),), run.actor.rollout_config.response_len)
        return run.actor.update(
            batch, loss=grpo_loss, epochs=self.config.epochs, mini_batches=self.config.mini_batches, keep_together="uid"
        )


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register GRPO."""
    return AlgorithmSpec("grpo", GRPO)
