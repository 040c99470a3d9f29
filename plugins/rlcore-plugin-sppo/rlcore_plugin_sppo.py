"""SPPO: self-play preference optimisation (arXiv 2405.00675).

For each prompt, G responses are sampled from the current policy pi_t and compared with one another by their scores.
The estimate of the probability that a response beats the policy is its win rate among the other responses,

    P_i = mean over j != i of  [s_i > s_j] + [s_i = s_j] / 2

With the log-ratio of a whole response to the policy that sampled it, summed over its tokens with response_mask 1,

    h_i = sum_t log pi(y_t) - log pi_t(y_t)

the policy minimises the mean over all responses of (equation 4.3)

    L = (h_i - eta (P_i - 1/2))^2

so that a response which always wins becomes exp(eta / 2) times as likely, and one that always loses as much less. The
squared error says how far to go, unlike REINFORCE's gradient. `eta` is 1 / beta of the paper, which uses 1,000 for
responses of hundreds of tokens; small models need far less. Groups whose scores are all equal have P = 1/2 and keep the
policy where it is. With keep=best_worst only the response with the highest and that with the lowest win rate of each
group are trained on, as the paper's runs do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataProto, Run, hookimpl, option
from rlcore.ops import Outputs, Term, episodes, group_index, masked_sum, metric, needs, objective, one_row_each

RLCORE_API = 1


@dataclass(frozen=True)
class SPPOConfig:
    """Settings of SPPO."""

    group_size: int = option(5, "responses per prompt", min=2)
    eta: float = option(20.0, "log-ratio between a response that always wins and one that always loses", min=1e-6)
    keep: Literal["all", "best_worst"] = option("all", "responses of a group that are trained on")
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


def win_rates(scores: Tensor, uid: Sequence[str], failed: Tensor) -> Tensor:
    """Return P fp32 [rows] of `scores` [rows] among the rows with the same `uid`; 1/2 for a row without another.

    `failed` bool [rows]: a reward that failed tells nothing about its response, so its comparisons are ties.
    """
    group = group_index(uid)
    same = group[:, None] == group
    wins = 0.5 + 0.5 * (scores[:, None] - scores).sign()
    wins[failed[:, None] | failed] = 0.5
    # A row ties with itself, which is half a win.
    others = same.sum(1) - 1
    return torch.where(others > 0, ((wins * same).sum(1) - 0.5) / others.clamp(min=1), torch.tensor(0.5))


def best_and_worst(rates: Tensor, uid: Sequence[str]) -> list[int]:
    """Return the rows with the highest and the lowest win rate of each group, the first one of equal ones."""
    group = group_index(uid)
    rows: list[int] = []
    for number in group.unique():
        own = (group == number).nonzero()[:, 0]
        rows += sorted({int(own[rates[own].argmax()]), int(own[rates[own].argmin()])})
    return rows


@needs("log_probs", "entropy")
def sppo_loss(out: Outputs, batch: Mapping[str, Any], config: SPPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    log_ratio = masked_sum(out.log_probs - batch["old_log_probs"], mask, dim=-1)
    error = log_ratio - config.eta * batch["advantages"]
    return {
        "policy": objective(error.square().sum(), len(error)),
        "log_ratio": metric((log_ratio * batch["advantages"].sign()).sum(), len(error)),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
    }


class SPPO(Algorithm):
    """One step: sample groups, score them, compare within each group, update the actor."""

    config_class = SPPOConfig
    config: SPPOConfig
    compares_samples = True

    def check(self, config: Config) -> None:
        """Raise ConfigError when some mini-batches would be empty."""
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} groups; make it at most {config.data.batch_size}"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = run.actor.generate(prompts.repeat(self.config.group_size))
        batch = batch.union(run.reward(batch))
        first, place = one_row_each(episodes(batch))
        rates = win_rates(batch["scores"][first], batch["uid"][first.numpy()], batch["reward_error"][first])
        run.log({"sppo/decided": float((rates != 0.5).double().mean())})
        rates = rates[place]
        batch["advantages"] = rates - 0.5
        if self.config.keep == "best_worst":
            batch = batch[best_and_worst(rates, batch["uid"])]
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        return run.actor.update(
            batch, loss=sppo_loss, epochs=self.config.epochs, mini_batches=self.config.mini_batches, keep_together="uid"
        )


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register SPPO."""
    return AlgorithmSpec("sppo", SPPO)
