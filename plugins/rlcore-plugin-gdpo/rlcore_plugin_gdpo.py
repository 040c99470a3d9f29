"""GDPO: group reward-decoupled normalisation (arXiv 2601.05242).

The loop, the loss and the KL are GRPO's, the advantages are not. With several rewards, GRPO normalises their sum, in
which different combinations of rewards are equal. Here each reward k is first normalised in its group (eq. 4), then all
are added with the weights of reward.functions and reward.model_weight (eq. 7), and normalised over the batch (eq. 6):

    A_ik = (s_ik - b_k) / (std(s_k) + 1e-6)                      (divide_by_std=false leaves out the division)
    a_i  = sum_k w_k A_ik                                        A_i = (a_i - mean(a)) / (std(a) + 1e-6)

with b_k the group's mean of reward k, or its mean weighted by length (baseline=length). A reward whose scores are equal
in the group adds 0. The scores are those of the functions themselves, so a weight of 2 counts twice as much, whatever
the reward's scale. With one reward, only the normalisation over the batch differs from GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rlcore_grpo import GRPO, GRPOConfig
from torch import Tensor

from rlcore import AlgorithmSpec, Config, DataProto, Run, hookimpl
from rlcore.ops import episodes, group_advantages, one_row_each

RLCORE_API = 1


@dataclass(frozen=True)
class GDPOConfig(GRPOConfig):
    """Settings of GDPO: those of GRPO."""


def named_weights(batch: DataProto, config: Config) -> dict[str, float]:
    """Return the weight of each reward by the column of its scores, `scores` where there is one reward."""
    names = [name for name in batch.keys() if name.startswith("score/")]  # noqa: SIM118 (a batch is not a dict)
    if not names:
        return {"scores": 1.0}
    # In the order of the functions, then the model's.
    reward = config.reward
    weights = [1.0] if reward.path is not None else list(reward.functions.values())
    return dict(zip(names, [*weights, reward.model_weight], strict=False))


def whitened(values: Tensor) -> Tensor:
    """Return `values` [rows] minus their mean, divided by their standard deviation + 1e-6; fp32 [rows]."""
    centred = values.double() - values.double().mean()
    variance = centred.square().sum() / max(len(values) - 1, 1)
    return (centred / (variance.sqrt() + 1e-6)).float()


def gdpo_advantages(
    scores: Sequence[Tensor],
    weights: Sequence[float],
    uid: Sequence[str],
    *,
    divide_by_std: bool,
    lengths: Tensor | None,
    episode: Sequence[str] | None = None,
) -> Tensor:
    """Return A_i of the module's docstring, fp32 [rows], for the scores [rows] of each reward and its weight.

    A score is NaN where its reward does not apply: it is compared among the other rows, and adds 0 to this one.
    `lengths` [rows] weigh the baseline. An `episode` counts once, as in `group_advantages`.
    """
    names, total = np.asarray(uid), torch.zeros(len(uid))
    own = np.asarray(range(len(uid)) if episode is None else episode)
    first, place = one_row_each(own)
    for weight, values in zip(weights, scores, strict=True):
        applies = ~values.isnan()
        within = None if lengths is None else lengths[applies]
        compared = group_advantages(
            values[applies],
            names[applies.numpy()],
            divide_by_std=divide_by_std,
            weights=within,
            episode=own[applies.numpy()],
        )
        total[applies] += weight * compared
    return whitened(total[first])[place]


class GDPO(GRPO):
    """GRPO's step with GDPO's advantages."""

    config_class = GDPOConfig
    config: GDPOConfig

    def with_advantages(self, run: Run, batch: DataProto) -> DataProto:
        """See GRPO."""
        weights = named_weights(batch, run.config)
        batch["advantages"] = gdpo_advantages(
            [batch[name] for name in weights],
            list(weights.values()),
            batch["uid"],
            divide_by_std=self.config.divide_by_std,
            lengths=batch["response_length"] if self.config.baseline == "length" else None,
            episode=episodes(batch),
        )
        return batch


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register GDPO."""
    return AlgorithmSpec("gdpo", GDPO)
