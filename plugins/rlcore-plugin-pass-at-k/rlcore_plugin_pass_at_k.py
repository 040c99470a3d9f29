"""PKPO: pass-at-k policy optimisation (arXiv 2505.15201).

The loop, the loss and the KL are GRPO's, the advantages are not. The policy maximises the expected best score of k
responses to a prompt, for scores of 0 and 1 the pass@k. With scores s_1..s_n of one prompt, and I over all sets of k of
its responses that hold i (eq. 33, the estimator with the smallest variance),

    A_i = n / C(n, k) sum_I [ max_{j in I} s_j - max_{j in I without i} s_j ]

which is how much response i adds to the best of k. sum_i A_i grad log pi(y_i) / n is unbiased for the gradient of the
expected best, as the second maximum does not depend on y_i. Only the best response of a set adds to it, so in order of
scores, with the responses j = 0, 1, ... below i, the sum is

    A_i = n / C(n, k) sum_{j < i} (s_i - s_j) C(j, k - 2)

No advantage is negative; a group of equal scores, or of fewer than k responses, gets 0. For k = 1 there is nothing to
compare with: use GRPO or RLOO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import ClassVar, Literal

import torch
from rlcore_grpo import GRPO
from torch import Tensor

from rlcore import AlgorithmSpec, Config, ConfigError, DataProto, Run, hookimpl, option
from rlcore.ops import episodes, group_index, one_row_each

RLCORE_API = 1


@dataclass(frozen=True)
class PassAtKConfig:
    """Settings of PKPO: k, and those of GRPO without the two of its advantages."""

    k: int = option(4, "responses of which the best counts", min=2)
    group_size: int = option(8, "responses per prompt, at least k", min=2)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", min=0.0)
    loss_mean: Literal["token", "sequence", "constant"] = option(
        "token", "mean over tokens, or over responses of their token means, or of their token sums / response_len"
    )
    kl_coef: float = option(0.0, "weight of the KL to the frozen reference; 0: no reference", min=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "how the KL is estimated from the sampled tokens")
    kl_unbiased: bool = option(False, "multiply the KL of a token by its ratio, which corrects the KL's gradient")
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)

    # GRPO's bounds for negative advantages, of which there are none.
    clip_low: ClassVar[float] = 0.0
    delta: ClassVar[None] = None


def pass_at_k_advantages(scores: Tensor, uid: Sequence[str], k: int) -> Tensor:
    """Return A_i of the module's docstring for `scores` [rows], fp32 [rows]; groups are rows of equal `uid`."""
    index, advantages = group_index(uid), torch.zeros(len(scores), dtype=torch.float64)
    for group in index.unique():
        rows = (index == group).nonzero()[:, 0]
        n = len(rows)
        if n < k:
            continue
        rows = rows[scores[rows].argsort(stable=True)]
        s = scores[rows].double()
        below = torch.tensor([n * comb(j, k - 2) / comb(n, k) for j in range(n)], dtype=torch.float64)
        advantages[rows] = (s[:, None] - s[None, :]).tril(-1) @ below
    return advantages.float()


class PassAtK(GRPO):
    """GRPO's step with PKPO's advantages."""

    config_class = PassAtKConfig
    config: PassAtKConfig

    def check(self, config: Config) -> None:
        """Raise ConfigError for groups of fewer than k responses."""
        super().check(config)
        if self.config.group_size < self.config.k:
            raise ConfigError(
                f"algo.group_size is {self.config.group_size}, which holds no {self.config.k} responses to choose the "
                f"best of; make it at least algo.k = {self.config.k}"
            )

    def with_advantages(self, run: Run, batch: DataProto) -> DataProto:
        """See GRPO. Groups of which failures left fewer than k episodes are left out, as they have no best of k."""
        sizes = Counter(batch["uid"][one_row_each(episodes(batch))[0].numpy()].tolist())
        batch = batch[[row for row, uid in enumerate(batch["uid"]) if sizes[uid] >= self.config.k]]
        run.log({"pass_at_k/dropped_groups": sum(size < self.config.k for size in sizes.values())})
        first, place = one_row_each(episodes(batch))
        uid = batch["uid"][first.numpy()]
        batch["advantages"] = pass_at_k_advantages(batch["scores"][first], uid, self.config.k)[place]
        return batch


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register PKPO."""
    return AlgorithmSpec("pass_at_k", PassAtK)
