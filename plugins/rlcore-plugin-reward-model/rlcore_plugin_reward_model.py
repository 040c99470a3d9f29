"""Reward model: Bradley-Terry on preference pairs (arXiv 1706.03741; as in InstructGPT, arXiv 2203.02155, eq. 1).

Each row of the data set holds a prompt x and two responses, `chosen` y+ and `rejected` y-. A language model with a
linear head in place of its vocabulary gives each a score r(x, y), read at the last token; the model minimises

    L = - M[ log sigmoid(r(x, y+) - r(x, y-)) ] + center M[ (r(x, y+) + r(x, y-))^2 ]

where M is the mean over pairs. The first term depends only on differences; with center > 0 the second keeps the scores
around 0 (arXiv 2312.09244). An evaluation scores the held-out pairs: `accuracy` is the share of pairs whose chosen
response scores higher, `margin` the mean difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore import (
    REWARD,
    Algorithm,
    AlgorithmSpec,
    Config,
    ConfigError,
    DataError,
    DataProto,
    Role,
    Run,
    hookimpl,
    option,
)
from rlcore.ops import Outputs, Term, metric, needs, objective

RLCORE_API = 1

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class RewardModelConfig:
    """Settings of the reward model."""

    center: float = option(0.0, "weight of the squared sum of a pair's scores, which keeps them around 0", min=0.0)
    mini_batches: int = option(1, "optimizer steps per batch of pairs", min=1)


def pairs(prompts: DataProto, run: Run) -> DataProto:
    """Return two rows per pair that differs: first all chosen, then all rejected responses.

    Adds `reward_model_pair` int64 [rows], the number of a row's pair, and `reward_model_chosen` bool [rows].
    """
    both = DataProto.concat(run.encode_pairs(prompts, *SIDES))
    count = len(both) // 2
    both["reward_model_pair"] = torch.arange(count).repeat(2)
    both["reward_model_chosen"] = torch.arange(2 * count) < count
    return both


def by_pair(scores: Tensor, batch: Mapping[str, Any] | DataProto) -> tuple[Tensor, Tensor]:
    """Return the `scores` [rows] of the chosen and of the rejected responses, each [pairs], ordered by pair."""
    order = batch["reward_model_pair"].argsort(stable=True)
    chosen = batch["reward_model_chosen"][order]
    return scores[order][chosen], scores[order][~chosen]


@needs("scores")
def bradley_terry(out: Outputs, batch: Mapping[str, Any], config: RewardModelConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring, and the pairs' accuracy and margin."""
    chosen, rejected = by_pair(out.scores, batch)
    count = batch["reward_model_chosen"].sum()
    margin = chosen - rejected
    terms = {
        "preference": objective(-F.logsigmoid(margin).sum(), count),
        "accuracy": metric((margin > 0).sum(), count),
        "margin": metric(margin.sum(), count),
    }
    if config.center > 0:
        terms["center"] = objective((chosen + rejected).square().sum(), count, weight=config.center)
    return terms


class RewardModel(Algorithm):
    """One step: encode the pairs of the batch, update the model."""

    config_class = RewardModelConfig
    uses_reward = False
    config: RewardModelConfig

    def roles(self) -> Mapping[str, Role]:
        """Return the reward model, which starts from `model.path` with a new head of zeros."""
        return {"reward_model": Role(trains=True, kind=REWARD)}

    def check(self, config: Config) -> None:
        """Raise ConfigError when a step has fewer pairs than mini-batches: some mini-batches would be empty."""
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} pairs; make it at most {config.data.batch_size}"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without two different responses."""
        for side in SIDES:
            if not isinstance(row.get(side), str):
                raise DataError(
                    f"column {side!r} holds {row.get(side)!r:.80}, not a response; its columns are {', '.join(row)}. "
                    "A preference pair needs a prompt, and in `chosen` and `rejected` a text or one message of the "
                    "assistant; put the messages before it into the prompt"
                )
        if row["chosen"] == row["rejected"]:
            raise DataError(f"both sides are {row['chosen']!r:.80}, so there is no preference; remove the pair")

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = pairs(prompts, run)
        # Responses are cut to rollout.response_len tokens.
        at_limit = batch["responses"].lengths == run.config.rollout.response_len
        run.log(at_limit=float(at_limit.double().mean()) if len(batch) else 0.0)
        run.log(equal_pairs=len(prompts) - len(batch) // 2)
        return run.reward_model.update(
            batch, loss=bradley_terry, mini_batches=self.config.mini_batches, keep_together="reward_model_pair"
        )

    def evaluate(self, run: Run, held_out: DataProto) -> Mapping[str, float]:
        """Return accuracy and margin of the held-out pairs."""
        batch = pairs(held_out, run)
        if not len(batch):
            raise DataError(
                f"all {len(held_out)} held-out pairs are equal in their first rollout.response_len="
                f"{run.config.rollout.response_len} tokens, so none holds a preference; raise it, or mend the data"
            )
        chosen, rejected = by_pair(run.reward_model.score(batch)["scores"], batch)
        margin = (chosen - rejected).double()
        return {"accuracy": float((margin > 0).double().mean()), "margin": float(margin.mean()), "pairs": len(margin)}


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register the training of reward models."""
    return AlgorithmSpec("reward_model", RewardModel)
