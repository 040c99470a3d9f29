"""MaxRL: maximum likelihood reinforcement learning (arXiv 2602.02710).

The loop, the loss and the KL are GRPO's, the advantages are not. For scores s_1..s_G of one prompt, 0 or 1 (or any
numbers from 0), with mean(s) > 0 (algorithm 1),

    A_i = (s_i - mean(s)) / mean(s)                              and A_i = 0 for a group whose scores are all 0

For binary scores the sum of s_i / mean(s) grad log pi(y_i) is, up to 1/G, the mean over the successes (eq. 9). In
expectation it is the gradient of sum_{k=1..G} (pass@k) / k, the series of the log of the pass rate cut off after G
terms (theorem 2); the scores alone give that of pass@1. So a prompt weighs the more the more rarely it is solved.
mean(s) in the numerator is a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from rlcore_grpo import GRPO

from rlcore import AlgorithmSpec, DataError, DataProto, Run, hookimpl, option
from rlcore.ops import episodes, group_means

RLCORE_API = 1


@dataclass(frozen=True)
class MaxRLConfig:
    """Settings of MaxRL: those of GRPO without the two of its advantages."""

    group_size: int = option(16, "responses per prompt, the number of terms of the likelihood's series", min=2)
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", min=0.0)
    delta: float | None = option(None, "bound of the ratio for negative advantages, above 1 + clip_high", min=1.0)
    loss_mean: Literal["token", "sequence", "constant"] = option(
        "token", "mean over tokens, or over responses of their token means, or of their token sums / response_len"
    )
    kl_coef: float = option(0.0, "weight of the KL to the frozen reference; 0: no reference", min=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "how the KL is estimated from the sampled tokens")
    kl_unbiased: bool = option(False, "multiply the KL of a token by its ratio, which corrects the KL's gradient")
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


class MaxRL(GRPO):
    """GRPO's step with MaxRL's advantages."""

    config_class = MaxRLConfig

    def with_advantages(self, run: Run, batch: DataProto) -> DataProto:
        """See GRPO. Raises DataError for a negative score, whose group could have a mean below 0."""
        scores = batch["scores"]
        if bool((scores < 0).any()):
            raise DataError(
                f"MaxRL divides by a group's mean score, and a score is {float(scores.min())}; give scores from 0, "
                "as 0 and 1, also for reward.error_value"
            )
        means = group_means(scores, batch["uid"], episode=episodes(batch))
        batch["advantages"] = torch.where(means > 0, (scores - means) / means, 0.0).float()
        return batch


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register MaxRL."""
    return AlgorithmSpec("maxrl", MaxRL)
