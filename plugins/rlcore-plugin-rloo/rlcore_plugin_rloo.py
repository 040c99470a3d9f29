"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al., "Back to Basics", arXiv 2402.14740).

For each prompt, k responses are sampled and scored. A response's reward is its score minus its KL to the reference,

    R_i = s_i - kl_coef * sum_t [ log pi(y_it) - log pi_ref(y_it) ]

its baseline is the mean reward of the other k - 1 responses, and the whole response is one action:

    A_i = R_i - mean_{j != i} R_j               L = - mean_i [ A_i * sum_t log pi(y_it) ]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, DataProto, Role, Run, hookimpl, option
from rlcore.ops import Outputs, Term, episodes, kl_estimate, leave_one_out, masked_sum, metric, objective

RLCORE_API = 1


@dataclass(frozen=True)
class RLOOConfig:
    """Settings of RLOO."""

    group_size: int = option(4, "responses per prompt", min=2)
    kl_coef: float = option(0.01, "weight of the KL to the frozen reference in a response's reward", min=0.0)


def response_rewards(batch: DataProto, *, kl_coef: float) -> dict[str, Tensor]:
    """Return each response's `rloo_reward` R_i and `rloo_kl`, the sum of its tokens' log-ratios: fp32 [rows]."""
    mask, policy, ref = (batch.view(name).to_padded() for name in ("response_mask", "old_log_probs", "ref_log_probs"))
    kl = masked_sum(kl_estimate(policy, ref, "k1"), mask, dim=-1)
    return {"rloo_reward": batch.view("scores") - kl_coef * kl, "rloo_kl": kl}


def rloo_loss(out: Outputs, batch: Mapping[str, Any], config: RLOOConfig) -> dict[str, Term]:
    """Return the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    log_prob = masked_sum(out.log_probs, mask, dim=-1)
    return {
        "policy": objective(-(batch["advantages"] * log_prob).sum(), len(mask)),
        "kl": metric(batch["rloo_kl"].sum(), mask.sum()),
    }


class RLOO(Algorithm):
    """One step: sample groups, score them, compare each response with the others, update the actor."""

    config_class = RLOOConfig
    config: RLOOConfig
    compares_samples = True

    def roles(self) -> Mapping[str, Role]:
        """Return the actor and the frozen reference."""
        return {"actor": Role(trains=True, generates=True), "ref": Role()}

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = run.actor.generate(prompts.repeat(self.config.group_size))
        scores = run.reward(batch)
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        batch = batch.union(run.ref.log_probs(batch, name="ref_log_probs"))
        batch = batch.union(scores)
        rewards = partial(response_rewards, kl_coef=self.config.kl_coef)
        batch = batch.union(batch.map(rewards, reads=["scores", "response_mask", "old_log_probs", "ref_log_probs"]))
        batch["advantages"] = leave_one_out(batch["rloo_reward"], batch["uid"], episode=episodes(batch))
        return run.actor.update(batch, loss=rloo_loss)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register RLOO."""
    return AlgorithmSpec("rloo", RLOO)
