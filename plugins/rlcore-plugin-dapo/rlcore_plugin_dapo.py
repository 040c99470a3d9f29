"""DAPO: decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476).

For each prompt, G responses are sampled from the current policy pi_old and scored. Four things differ from GRPO:

Dynamic sampling (section 3.2). A group whose scores are all equal teaches nothing and is dropped. Further prompts are
sampled until the step has data.batch_size groups or has done max_rounds rounds. If groups are missing after the last
round, the step trains on those that it has, and logs dapo/missing_groups and a warning. Groups beyond the full batch
are left out (dapo/surplus_groups).

Overlong shaping (section 3.4). With L = rollout.response_len and a buffer of B = overlong_buffer * L tokens at its end,
a response of |y_i| tokens with the score s_i gets a soft length penalty,

    R_i = s_i + overlong_penalty * clip((L - B - |y_i|) / B, -1, 0)              A_i = (R_i - mean(R)) / (std(R) + 1e-6)

Token-level loss (section 3.3), a mean over all tokens of the mini-batch, with clip-higher (section 3.1): the upper
bound is wider than the lower one, so that unlikely tokens can grow. With r_it = pi(y_it) / pi_old(y_it) and no KL,

    L = - M[ min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) ]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataProto, Run, hookimpl, option
from rlcore.ops import (
    Outputs,
    Term,
    episodes,
    group_advantages,
    group_index,
    kl_estimate,
    masked_sum,
    metric,
    needs,
    objective,
)

RLCORE_API = 1

log = logging.getLogger("rlcore.dapo")


@dataclass(frozen=True)
class DAPOConfig:
    """Settings of DAPO."""

    group_size: int = option(8, "responses per prompt", min=2)
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(0.28, "the ratio is clipped at 1 + clip_high", min=0.0)
    max_rounds: int = option(10, "most rounds of sampling in a step; 1: equal groups are dropped, not replaced", min=1)
    overlong_buffer: float = option(
        0.2, "last share of rollout.response_len, over which the length penalty grows; 0: no penalty", min=0.0, max=1.0
    )
    overlong_penalty: float = option(1.0, "length penalty of a response of full length", min=0.0)
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


def differing(scores: Tensor, uid: Sequence[str]) -> Tensor:
    """Return bool [rows]: whether `scores` [rows] differ among the rows with the row's `uid`."""
    group = group_index(uid)
    bounds = torch.zeros(len(group.unique()))
    highest = bounds.scatter_reduce(0, group, scores, "amax", include_self=False)
    lowest = bounds.scatter_reduce(0, group, scores, "amin", include_self=False)
    return (highest != lowest)[group]


def overlong_penalty(lengths: Tensor, limit: int, share: float) -> Tensor:
    """Return fp32 [rows], 0 to -1: the part of the last `share` of `limit` tokens that `lengths` fill (eq. 13)."""
    buffer = share * limit
    if buffer == 0:
        return torch.zeros(len(lengths))
    return ((limit - buffer - lengths) / buffer).clamp(-1, 0).float()


def shaped_scores(scores: Tensor, lengths: Tensor, limit: int, config: DAPOConfig) -> tuple[Tensor, Tensor]:
    """Return the scores lowered by the penalty of overlong responses, and the penalty: fp32 [rows], at most 0."""
    penalty = config.overlong_penalty * overlong_penalty(lengths, limit, config.overlong_buffer)
    return scores + penalty, penalty


@needs("log_probs", "entropy")
def dapo_loss(out: Outputs, batch: Mapping[str, Any], config: DAPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    advantages = batch["advantages"][:, None]
    gain, clipped = out.clipped_surrogate(batch["old_log_probs"], advantages, config.clip_low, config.clip_high)
    return {
        "policy": objective(-masked_sum(gain, mask), mask.sum()),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
        "clipped": metric(masked_sum(clipped.float(), mask), mask.sum()),
        "kl_old": metric(
            masked_sum(kl_estimate(batch["old_log_probs"], out.log_probs, "k3", out.log_ratio_bound), mask), mask.sum()
        ),
    }


class DAPO(Algorithm):
    """One step: sample until the batch is full of groups with differing scores, shape the scores, update the actor."""

    config_class = DAPOConfig
    config: DAPOConfig
    compares_samples = True

    def check(self, config: Config) -> None:
        """Raise ConfigError when there are more mini-batches than groups."""
        if config.trainer.epochs is not None:
            raise ConfigError(
                f"trainer.epochs = {config.trainer.epochs} counts one batch of prompts for each step, and a step of "
                "DAPO takes as many as it needs; give trainer.total_steps"
            )
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} groups; make it at most {config.data.batch_size}"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = self._full_batch(run, prompts)
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        config = self.config
        limit = run.actor.rollout_config.response_len
        scores, penalty = shaped_scores(batch["scores"], batch["response_length"], limit, config)
        run.log({"dapo/overlong": float(penalty.mean()) if len(batch) else 0.0})
        batch["advantages"] = group_advantages(scores, batch["uid"], episode=episodes(batch))
        return run.actor.update(
            batch, loss=dapo_loss, epochs=config.epochs, mini_batches=config.mini_batches, keep_together="uid"
        )

    def _full_batch(self, run: Run, prompts: DataProto) -> DataProto:
        """Return data.batch_size scored groups whose scores differ, or fewer after max_rounds rounds."""
        wanted = run.config.data.batch_size
        kept: list[DataProto] = []
        groups = dropped = 0
        while True:
            batch = run.actor.generate(prompts.repeat(self.config.group_size))
            batch = batch.union(run.reward(batch))
            kept.append(batch[differing(batch["scores"], batch["uid"])])
            found = len(set(kept[-1]["uid"]))
            groups, dropped = groups + found, dropped + len(prompts) - found
            if groups >= wanted or len(kept) == self.config.max_rounds:
                break
            prompts = run.next_prompts()
        missing = max(wanted - groups, 0)
        if missing:
            log.warning(
                "step %d trains on %d of %d groups: in %d rounds of sampling all others had equal scores, or none",
                *(run.step, groups, wanted, len(kept)),
            )
        run.log({"dapo/rounds": len(kept), "dapo/dropped_groups": dropped})
        run.log({"dapo/missing_groups": missing, "dapo/surplus_groups": max(groups - wanted, 0)})
        batch = DataProto.concat(kept)
        return batch[group_index(batch["uid"]) < wanted]


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register DAPO."""
    return AlgorithmSpec("dapo", DAPO)
