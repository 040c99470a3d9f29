"""A step's metrics, from what the algorithm returned and from the batches that it had scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from rlcore.config import Config
from rlcore.errors import DataError
from rlcore.ops import group_index
from rlcore.protocol import DataProto


def logprob_diff_warning(gap: float, config: Config) -> str:
    """Return what to tell the user of a step in which the engines' log-probs are `gap` nats apart, and what causes it.

    The likely cause is the first of those known to set them apart that the config has.
    """
    rollout, model, ahead = config.rollout, config.model, config.trainer.rollouts_ahead
    if math.isnan(gap):
        return (
            "the log-probs that the rollout engine gave of its samples, or training's, are not numbers: "
            f"rollout={rollout.name} has wrong weights, or one of the two computes the model wrongly"
        )
    cuts = {
        "temperature": rollout.temperature == 0,
        "top_p": rollout.top_p < 1,
        "top_k": rollout.top_k > 0,
        "min_tokens": rollout.min_tokens > 0,
    }
    cut = ", ".join(f"rollout.{name}={getattr(rollout, name)}" for name, is_set in cuts.items() if is_set)
    if cut:
        cause = f"{cut} samples from a part of the distribution, the log-probs of training are of all of it"
    elif ahead:
        cause = (
            f"samples are of weights that are up to {ahead} steps older (trainer.rollouts_ahead), and the policy moves"
        )
    elif model.dtype == "bf16":
        cause = f"bf16 is rounded otherwise by rollout={rollout.name} than in training; model.dtype=fp32 tells for sure"
    else:
        cause = (
            f"in fp32 the two compute the same, so rollout={rollout.name} has other weights than training, or one of "
            "them computes the model wrongly"
        )
    return (
        f"the rollout engine's log-probs of its samples differ from training's by {gap:.3g} nats on average, more than "
        f"trainer.train_rollout_logprob_diff = {config.trainer.train_rollout_logprob_diff:g}. Likely cause: {cause}. "
        "trainer.importance=token, sequence or mask corrects what is left (docs/rollout.md)"
    )


def step_metrics(
    returned: Mapping[str, Any], logged: Mapping[str, float], scored: list[DataProto], pass_score: float
) -> dict[str, float]:
    """Return the step's metrics, and under `tokens` the number of prompt and response tokens that were sampled.

    Over all samples that were scored in the step: reward/mean, /std, /errors, /accuracy, response/mean_length, and the
    health of the step: health/equal_groups (share of prompts whose samples all got the same reward, which teach a
    group-relative method nothing), health/effective_tokens (response tokens of the other prompts), both left out where
    no prompt has several samples, and health/truncated (share of responses that were cut off). kl/mean is the loss term
    `kl`, else `kl_old`. Raises DataError when the algorithm returned something else than numbers by name, and for
    scores that are not finite, naming their samples.
    """
    metrics = {**_numbers(returned), **logged}
    for name in ("loss/kl", "loss/kl_old"):
        if name in metrics:
            metrics["kl/mean"] = metrics[name]
            break
    metrics["tokens"] = 0.0
    scored = [batch for batch in scored if len(batch)]
    if not scored:
        return metrics
    _check_scores(scored)
    scores = torch.cat([batch["scores"] for batch in scored]).double()
    errors = torch.cat([batch["reward_error"] for batch in scored])
    lengths = torch.cat([batch["response_length"] for batch in scored])
    finished = torch.cat([batch["finished"] for batch in scored])
    prompt_tokens = sum(int(batch["prompt_length"].sum()) for batch in scored)
    uid = [u for batch in scored for u in batch["uid"]]
    group = group_index(uid)
    groups = int(group.max()) + 1
    highest = torch.full((groups,), -math.inf, dtype=torch.float64).scatter_reduce(0, group, scores, "amax")
    lowest = torch.full((groups,), math.inf, dtype=torch.float64).scatter_reduce(0, group, scores, "amin")
    equal = highest == lowest
    metrics.update(
        {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std(correction=0)),
            "reward/accuracy": float(((scores >= pass_score) & ~errors).double().mean()),
            "reward/errors": float(errors.sum()),
            "response/mean_length": float(lengths.double().mean()),
            "health/truncated": 1.0 - float(finished.double().mean()),
            "tokens": float(prompt_tokens + int(lengths.sum())),
        }
    )
    if groups < len(uid):  # a group of one is equal to itself, which says nothing
        metrics["health/equal_groups"] = float(equal.double().mean())
        metrics["health/effective_tokens"] = float(lengths[~equal[group]].sum())
    for name in scored[0].keys():  # noqa: SIM118 (a batch is not a dict)
        if name.startswith("score/") and all(name in batch for batch in scored):
            metrics[f"reward/{name.removeprefix('score/')}"] = float(
                torch.cat([b[name] for b in scored]).double().mean()
            )
    return metrics


def _check_scores(scored: list[DataProto]) -> None:
    """Stop for what an algorithm may have passed over: NaN is neither above a threshold nor better than another."""
    for batch in scored:
        finite = batch["scores"].isfinite()
        if not finite.all():
            row = int((~finite).int().argmax())
            first = f"the first, of uid={batch['uid'][row]}, is {float(batch['scores'][row])}"
            raise DataError(
                f"{int((~finite).sum())} of {len(batch)} scores are not finite; {first}. "
                "Mend the reward; reward.error_value must be a finite number too"
            )


def _numbers(returned: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise DataError(f"the algorithm's step returned {type(returned).__name__}; it must return metrics by name")
    for name, value in returned.items():
        if not isinstance(value, Real):
            raise DataError(f"the algorithm's step returned {name}={value!r}; a metric is a number")
    return {name: float(value) for name, value in returned.items()}
