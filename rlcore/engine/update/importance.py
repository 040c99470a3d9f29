"""Importance weights for samples of another policy than the trained one, and the difference of the two policies.

They differ when weights are older (`trainer.rollouts_ahead`), when rollout and train engine round differently, or when
one of them is wrong. Let b be the policy that sampled token t of a row, and pi_old the policy of `old_log_probs`
(without that column: the current weights, as constants). The gradient of each token's part of a loss is multiplied by a
weight w_t, a function of pi_old(y_t) / b(y_t) that `trainer.importance` chooses.

This is decoupled PPO (arXiv 2110.00641), in which the behaviour policy differs from the proximal policy of the clipped
ratio. Losses need no change: their inputs keep their values, and the gradients are multiplied by w_t on the way back to
the model. For a loss of per-token outputs this equals weighting every token's term: the loss's derivative is the sum
over tokens of dL/d(output_t) times d(output_t)/d(weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from rlcore.engine.collectives import Ranks
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.loss_accumulator import LossAccumulator, LossBatch
from rlcore.ops import Need, Outputs, importance_weights, needs_of, train_rollout_logprob_diff
from rlcore.protocol import DataProto

LOGPROB_DIFF_BOUND = 0.5
"""Nats by which a token's two log-probs may differ before it counts in rollout/train_rollout_logprob_diff_beyond."""


def is_sampled(item: UpdateItem) -> bool:
    """Whether the item's rows are samples whose log-probs are known."""
    return "rollout_log_probs" in item.batch and "response_mask" in item.batch


def is_corrected(item: UpdateItem) -> bool:
    """Whether the item's tokens get importance weights: it asks for them, and the rows are samples."""
    return item.importance is not None and is_sampled(item)


def forward_needs(item: UpdateItem) -> Sequence[Need]:
    """Return the outputs that the loss needs, and log-probs where only the importance weights need them."""
    needs = needs_of(item.loss)
    if is_corrected(item) and "old_log_probs" not in item.batch:
        return tuple(dict.fromkeys([*needs, "log_probs"]))
    return needs


def correct(out: Outputs, batch: DataProto, accumulator: LossAccumulator, device: torch.device) -> Outputs:
    """Return a micro-batch's outputs with equal values, whose gradients are weighted; record the weights' statistics.

    Outputs are per token: [rows, tokens], logits [rows, tokens, vocab]. Tokens with response_mask 0 have weight 1.
    Metrics: train/importance_weight (mean), train/importance_truncated (share of tokens whose ratio is above the cap,
    or, of a mask, outside its band).
    """
    how = accumulator.item.importance
    assert how is not None
    columns = LossBatch(batch, device)
    # Constants, or the weights themselves would get a gradient.
    old = columns["old_log_probs"] if "old_log_probs" in batch else out.log_probs.detach()
    sampled, mask = columns["rollout_log_probs"], columns["response_mask"].bool()
    weigh = partial(importance_weights, old, sampled, mask, how.kind, bound=out.log_ratio_bound)
    weights = weigh(cap=how.cap, band=how.band)
    cut = weights < weigh()
    accumulator.add_metric("train/importance_weight", weights[mask].sum(), mask.sum())
    accumulator.add_metric("train/importance_truncated", cut[mask].sum(), mask.sum())
    return replace(out, given={name: _weighted(out.given[name], weights) for name in needs_of(accumulator.item.loss)})


def measure_logprob_diff(
    out: Outputs, batch: DataProto, accumulator: LossAccumulator, device: torch.device, *, version: int
) -> None:
    """Record the difference of the train engine's and the rollout engine's log-probs of sampled tokens.

    Metrics: rollout/train_rollout_logprob_diff (mean absolute difference, nats), the same with _max, with _beyond
    (share of tokens that differ by more than LOGPROB_DIFF_BOUND) and with _same_weights (mean over the rows that the
    weights of `version`, those of this forward, have sampled; left out without such rows), rollout/kl (of the trained
    policy from the sampling one).
    """
    if "log_probs" not in out.given:
        return
    columns = LossBatch(batch, device)
    gap = train_rollout_logprob_diff(
        out.log_probs,
        columns["rollout_log_probs"],
        columns["response_mask"],
        LOGPROB_DIFF_BOUND,
        log_ratio_bound=out.log_ratio_bound,
    )
    accumulator.add_metric("rollout/train_rollout_logprob_diff", gap["difference"], gap["tokens"])
    accumulator.add_metric("rollout/train_rollout_logprob_diff_beyond", gap["beyond"], gap["tokens"])
    accumulator.add_metric("rollout/kl", gap["kl"], gap["tokens"])
    accumulator.track_max("rollout/train_rollout_logprob_diff_max", gap["max"])
    if "weights_version" in batch:
        same = columns["response_mask"].bool() & (columns["weights_version"] == version)[:, None]
        apart = (out.log_probs.detach() - columns["rollout_log_probs"]).abs()
        name = "rollout/train_rollout_logprob_diff_same_weights"
        accumulator.add_metric(name, torch.where(same, apart, 0.0).sum(), same.sum())


def _weighted(output: Tensor, weights: Tensor) -> Tensor:
    """Return `output` [rows, tokens, ...] with its gradient multiplied by `weights` [rows, tokens]."""
    shaped = weights.view(*weights.shape, *[1] * (output.dim() - 2))
    # A view of its own: a hook on `output` itself would also weight the gradients of other readers.
    same = output.view_as(output)
    same.register_hook(lambda gradient: gradient * shaped)  # type: ignore[no-untyped-call]
    return same


def staleness(items: Sequence[UpdateItem], version: int, ranks: Ranks) -> dict[str, float]:
    """Return the age of the rows of all ranks: the optimizer steps between their weights and `version`.

    Metrics: rollout/staleness (mean) and rollout/staleness_max; none if no item has importance weights.
    """
    mine: list[int] = []
    corrected = [item.batch for item in items if is_corrected(item) and "weights_version" in item.batch]
    for batch in corrected:
        mine += (version - batch.view("weights_version")).tolist()
    if not corrected:
        return {}
    # Every rank has the same items, so all or none reach this gather.
    ages = list(chain.from_iterable(ranks.gather(mine)))
    return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness_max": float(max(ages))} if ages else {}
