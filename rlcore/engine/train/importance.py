"""Truncated importance weights for samples of older weights (`trainer.rollouts_ahead`).

With b the weights that sampled token t of a row and pi_old those that the algorithm compares with (`old_log_probs`;
without that column the weights of the moment, as constants), the gradient of each token's part of a loss is multiplied
by

    w_t = min(pi_old(y_t) / b(y_t), trainer.importance_cap)

This is decoupled PPO (arXiv 2110.00641: the behaviour policy is another than the proximal one, against which the ratio
is clipped), per token and with the weight truncated from above like rho in V-trace (IMPALA, arXiv 1802.01561, section
4.1). Losses know nothing of it: the value of what they get is unchanged, and its gradient is multiplied by w_t
on the way back to the model. For a loss that sees the policy through outputs per token this equals weighting every
token's term: its derivative is the sum over tokens of dL/d(output_t) times d(output_t)/d(weights).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rlcore.engine.ranks import Ranks
from rlcore.engine.train.accounting import Account, LossBatch
from rlcore.engine.train.base import UpdateItem
from rlcore.ops import Need, Outputs, needs_of
from rlcore.protocol import DataProto


def is_corrected(item: UpdateItem) -> bool:
    """Whether the item's tokens get importance weights: a cap is set, and the rows are samples."""
    sampled = "rollout_log_probs" in item.batch and "response_mask" in item.batch
    return item.importance_cap is not None and sampled


def forward_needs(item: UpdateItem) -> Collection[Need]:
    """Return what the forward has to give: what the loss needs, and log-probs where only the weights need them."""
    needs = needs_of(item.loss)
    if is_corrected(item) and "old_log_probs" not in item.batch:
        return tuple(dict.fromkeys([*needs, "log_probs"]))
    return needs


def correct(out: Outputs, batch: DataProto, account: Account, device: torch.device) -> Outputs:
    """Return a micro-batch's outputs with equal values, whose gradients are weighted; book the weights' statistics.

    Outputs are per token: [rows, tokens], logits [rows, tokens, vocab]. Tokens with response_mask 0 have weight 1.
    Metrics: train/importance_weight (mean), train/importance_truncated (share of tokens above the cap).
    """
    cap = account.item.importance_cap
    assert cap is not None
    columns = LossBatch(batch, device)
    old = columns["old_log_probs"] if "old_log_probs" in batch else out.log_probs.detach()
    ratio = (old - columns["rollout_log_probs"]).exp()
    mask = columns["response_mask"].bool()
    weights = torch.where(mask, ratio.clamp(max=cap), 1.0)
    account.book("train/importance_weight", weights[mask].sum(), mask.sum())
    account.book("train/importance_truncated", (ratio > cap)[mask].sum(), mask.sum())
    return Outputs({name: _weighted(out.given[name], weights) for name in needs_of(account.item.loss)})


def _weighted(output: Tensor, weights: Tensor) -> Tensor:
    """Return `output` [rows, tokens, ...] with its gradient multiplied by `weights` [rows, tokens]."""
    shaped = weights.view(*weights.shape, *[1] * (output.dim() - 2))
    same = output.view_as(output)
    same.register_hook(lambda gradient: gradient * shaped)  # type: ignore[no-untyped-call]
    return same


def staleness(items: Sequence[UpdateItem], version: int, ranks: Ranks) -> dict[str, float]:
    """Return by how many optimizer steps the weights that sampled the rows of all ranks are behind `version`.

    Metrics: rollout/staleness (mean) and rollout/staleness_max; none where nothing is corrected.
    """
    batches = [item.batch for item in items if is_corrected(item) and "weights_version" in item.batch]
    if not batches:
        return {}
    mine = [version - made for batch in batches for made in batch.view("weights_version").tolist()]
    ages = [age for of_rank in ranks.gather(mine) for age in of_rank]
    return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness_max": float(max(ages))} if ages else {}
