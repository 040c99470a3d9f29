"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783).

For each prompt, G responses are sampled from the current policy pi_old and scored. With scores s_1..s_G of one prompt,

    A_i = (s_i - b) / (std(s) + 1e-6)                            (divide_by_std=false leaves out the division)

with the baseline b = mean(s), or for baseline=length the mean weighted by the responses' lengths (OPO, 2505.23585).
With the ratio r_it = pi(y_it) / pi_old(y_it) of token t of response i, the policy minimises

    L   = - M[ min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) ] + kl_coef M[ KL_it ]

where KL_it estimates KL(pi || pi_ref) from the sampled token (k1, k2 or k3; kl_coef=0: no reference is started) and
M is the mean over all tokens of the mini-batch (loss_mean=token), the mean over responses of each response's own mean
(loss_mean=sequence, the paper's form), or the sum over all tokens divided by responses times rollout.response_len
(loss_mean=constant). Dr. GRPO: divide_by_std=false, loss_mean=constant, kl_coef=0. Where A_i < 0, delta bounds r_it
from above in the first product (2505.07291). kl_unbiased multiplies KL_it by r_it, with the gradient through both: that
of k1 and k3 is then the KL's (2512.02556). Without it, that of k3 is not, and that of k1 is 0 on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataProto, Role, Run, hookimpl, option
from rlcore.ops import (
    Outputs,
    Term,
    episodes,
    group_advantages,
    kl_estimate,
    masked_mean,
    masked_sum,
    metric,
    needs,
    objective,
)

RLCORE_API = 1


@dataclass(frozen=True)
class GroupConfig:
    """Settings of GRPO's loop, advantages and KL."""

    group_size: int = option(8, "responses per prompt", min=2)
    divide_by_std: bool = option(True, "divide advantages by the group's standard deviation")
    baseline: Literal["mean", "length"] = option("mean", "the group's mean score, or its mean weighted by length (OPO)")
    kl_coef: float = option(0.0, "weight of the KL to the frozen reference; 0: no reference", min=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "estimator of the sampled tokens' KL", needs="algo.kl_coef")
    kl_unbiased: bool = option(False, "multiply the KL of a token by its ratio, which corrects the KL's gradient")
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


@dataclass(frozen=True)
class GRPOConfig(GroupConfig):
    """Settings of GRPO."""

    kl_coef: float = option(0.001, "weight of the KL to the frozen reference; 0: no reference", min=0.0)
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", min=0.0)
    delta: float | None = option(None, "bound of the ratio for negative advantages, above 1 + clip_high", min=1.0)
    loss_mean: Literal["token", "sequence", "constant"] = option(
        "token", "mean over tokens, or over responses of their token means, or of their token sums / response_len"
    )


@needs("log_probs", "entropy")
def grpo_loss(out: Outputs, batch: Mapping[str, Any], config: GRPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask, old, advantages = batch["response_mask"], batch["old_log_probs"], batch["advantages"][:, None]
    gain, clipped = out.clipped_surrogate(old, advantages, config.clip_low, config.clip_high, config.delta)

    def mean(values: Tensor, weight: float = 1.0) -> Term:
        if config.loss_mean == "sequence":
            return objective(masked_mean(values, mask, dim=-1).sum(), mask.any(-1).sum(), weight)
        count = mask.sum() if config.loss_mean == "token" else len(mask) * batch["response_len"]
        return objective(masked_sum(values, mask), count, weight)

    terms = {"policy": mean(-gain)}
    if config.kl_coef > 0:
        kl = kl_estimate(out.log_probs, batch["ref_log_probs"], config.kl_estimator, out.log_ratio_bound)
        terms["kl"] = mean(kl * out.ratio(old) if config.kl_unbiased else kl, config.kl_coef)
    kl_old = kl_estimate(old, out.log_probs, "k3", out.log_ratio_bound)
    measured = {"entropy": out.entropy, "clipped": clipped.float(), "kl_old": kl_old}
    return terms | {name: metric(masked_sum(values, mask), mask.sum()) for name, values in measured.items()}


class GRPO(Algorithm):
    """One step: sample groups, score them, compare within each group, update the actor."""

    config_class: ClassVar[type] = GRPOConfig
    compares_samples = True
    loss: ClassVar[staticmethod[..., Mapping[str, Term]]] = staticmethod(grpo_loss)

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, and the frozen reference if the KL is used."""
        actor = {"actor": Role(trains=True, generates=True)}
        return {**actor, "ref": Role()} if self.config.kl_coef > 0 else actor

    def check(self, config: Config) -> None:
        """Raise ConfigError for empty mini-batches, and for a KL without a gradient."""
        algo = self.config
        if algo.kl_coef > 0 and algo.kl_estimator == "k1" and not algo.kl_unbiased:
            raise ConfigError("algo.kl_estimator=k1 has zero expected gradient; set k2, k3 or algo.kl_unbiased=true")
        if config.data.batch_size < algo.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {algo.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} groups; make it at most {config.data.batch_size}"
            )

    def with_advantages(self, run: Run, batch: DataProto) -> DataProto:
        """Return the batch with the column `advantages`: A_i of each row, fp32 [rows]."""
        how = {"divide_by_std": self.config.divide_by_std, "episode": episodes(batch)}
        weights = batch["response_length"] if self.config.baseline == "length" else None
        batch["advantages"] = group_advantages(batch["scores"], batch["uid"], weights=weights, **how)
        return batch

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = run.actor.generate(prompts.repeat(self.config.group_size))
        rewards = run.reward(batch)
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        if self.config.kl_coef > 0:
            batch = batch.union(run.ref.log_probs(batch, name="ref_log_probs"))
        batch = self.with_advantages(run, batch.union(rewards))
        passes = {"epochs": self.config.epochs, "mini_batches": self.config.mini_batches}
        constants = {"response_len": run.actor.rollout_config.response_len}
        return run.actor.update(batch, loss=self.loss, keep_together="uid", constants=constants, **passes)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register GRPO."""
    return AlgorithmSpec("grpo", GRPO)
