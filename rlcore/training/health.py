"""A step's metrics, from the algorithm's own numbers and the batches scored in the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rlcore.data.curriculum import PromptResult
from rlcore.errors import DataError
from rlcore.ops import episodes, group_index, one_row_each
from rlcore.protocol import DataProto
from rlcore.rewards.failures import has_reward, left_alone


def step_metrics(
    returned: Mapping[str, Any], logged: Mapping[str, float], scored: list[DataProto], pass_score: float
) -> dict[str, float]:
    """Return the step's metrics, and under `tokens` the number of prompt and response tokens of its samples.

    Over all samples scored in the step: response/mean_length, health/truncated (share of responses that were cut off)
    and reward/errors (failed rewards). Over the episodes that have a reward, whose branches are one sample:
    reward/mean, /std, /accuracy, reward/NAME (mean score of each reward function with a column), and three that are
    left out when no prompt has several samples: reward/dropped_groups (prompts of which failures left a single sample),
    health/equal_groups (share of prompts whose samples all got the same reward, which teach a group-relative method
    nothing) and health/effective_tokens (response tokens of the other prompts). Of episodes: episodes/turns and
    episodes/tool_calls (means over rows) and episodes/tool_errors (share of the calls). kl/mean is the loss term `kl`,
    else `kl_old`. Raises DataError when the algorithm returned anything but numbers by name, and for scores that are
    not finite, naming their samples.
    """
    metrics = {**_numbers(returned), **logged}
    for name in ("loss/kl", "loss/kl_old"):
        if name in metrics:
            metrics["kl/mean"] = metrics[name]
            break
    scored = [batch for batch in scored if len(batch)]
    if not scored:
        return {**metrics, "tokens": 0.0}
    _check_scores(scored)
    present = torch.cat([has_reward(batch) for batch in scored])
    names = [f"{call} {name}" for call, batch in enumerate(scored) for name in episodes(batch)]
    # The first row with a reward of each episode: its branches have one score.
    counted = present.nonzero()[:, 0]
    counted = counted[one_row_each([names[row] for row in counted.tolist()])[0]]
    scores = _column(scored, "scores").double()[counted]
    errors, lengths = _column(scored, "reward_error"), _column(scored, "response_length")
    tokens = int(_column(scored, "prompt_length").sum()) + int(lengths.sum())
    if len(scores):
        metrics["reward/mean"] = float(scores.mean())
        metrics["reward/std"] = float(scores.std(correction=0))
        metrics["reward/accuracy"] = float(((scores >= pass_score) & ~errors[counted]).double().mean())
    metrics.update(
        {
            "tokens": float(tokens),
            "reward/errors": float(errors.sum()),
            "response/mean_length": float(lengths.double().mean()),
            "health/truncated": 1.0 - float(_column(scored, "finished").double().mean()),
        }
    )
    metrics.update(_group_health(scored, names, present, lengths))
    metrics.update(_episode_means(scored))
    for name in scored[0].keys():  # noqa: SIM118 (a batch is not a dict)
        if name.startswith("score/") and all(name in batch for batch in scored):
            of_function = _column(scored, name).double()[counted]
            if not of_function.isnan().all():  # NaN: the function does not apply to the row
                metrics[f"reward/{name.removeprefix('score/')}"] = float(of_function.nanmean())
    return metrics


def prompt_results(scored: list[DataProto]) -> dict[str, PromptResult]:
    """Return what the samples of each prompt have shown, by uid; of prompts of which no sample has a reward nothing.

    Episodes count once. A result is equal where several episodes of the prompt all have the same reward.
    """
    rewards: dict[str, dict[str, float]] = {}
    for call, batch in enumerate(scored):
        rows = zip(has_reward(batch).tolist(), batch["uid"], episodes(batch), batch["scores"].tolist(), strict=True)
        for _, uid, name, score in (row for row in rows if row[0]):
            rewards.setdefault(str(uid), {}).setdefault(f"{call} {name}", score)
    return {
        uid: PromptResult(sum(found.values()) / len(found), len(found) > 1 and len({*found.values()}) == 1)
        for uid, found in rewards.items()
    }


def source_metrics(scored: list[DataProto], pass_scores: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of each source of `data.mix` in the batches scored in a step.

    pass_scores: by source, the score from which on a sample is right. mix/NAME/samples counts its rows;
    mix/NAME/reward and mix/NAME/accuracy are means over its episodes that have a reward, as step_metrics counts them.
    """
    metrics: dict[str, float] = {}
    for name, pass_score in pass_scores.items():
        rows = [batch[list(batch.view("mix_source") == name)] for batch in scored if "mix_source" in batch]
        own = step_metrics({}, {}, rows, pass_score)
        metrics[f"mix/{name}/samples"] = float(sum(map(len, rows)))
        for metric, of_all in (("reward", "reward/mean"), ("accuracy", "reward/accuracy")):
            if of_all in own:
                metrics[f"mix/{name}/{metric}"] = own[of_all]
    return metrics


def _column(batches: list[DataProto], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in batches])


def _episode_means(scored: list[DataProto]) -> dict[str, float]:
    """Return the metrics of the rows that are episodes; nothing without such rows."""
    episodes = [batch for batch in scored if "turns" in batch]
    if not episodes:
        return {}
    turns, calls, errors = (_column(episodes, name).double() for name in ("turns", "tool_calls", "tool_errors"))
    return {
        "episodes/turns": float(turns.mean()),
        "episodes/tool_calls": float(calls.mean()),
        "episodes/tool_errors": float(errors.sum() / calls.sum().clamp(min=1)),
    }


def _group_health(scored: list[DataProto], names: list[str], present: Tensor, lengths: Tensor) -> dict[str, float]:
    """Return the metrics of groups; nothing when every prompt has a single sample.

    `names` are the episodes of all rows, `present` is bool, whether a row has a reward.
    """
    uid = list(chain.from_iterable(batch["uid"] for batch in scored))
    of_all = group_index(uid)
    if int(of_all.max()) + 1 == len(set(names)) or not present.any():  # a group of one always has equal rewards
        return {}
    alone = left_alone(present, of_all, names)
    scores = _column(scored, "scores").double()[present]
    group = of_all[present].unique(return_inverse=True)[1]
    groups = int(group.max()) + 1
    highest = torch.full((groups,), -math.inf, dtype=torch.float64).scatter_reduce(0, group, scores, "amax")
    lowest = torch.full((groups,), math.inf, dtype=torch.float64).scatter_reduce(0, group, scores, "amin")
    equal = highest == lowest
    return {
        "reward/dropped_groups": float(len(of_all[alone].unique())),
        "health/equal_groups": float(equal.double().mean()),
        "health/effective_tokens": float(lengths[present][~equal[group]].sum()),
    }


def _check_scores(scored: list[DataProto]) -> None:
    """Stop at a score that is not finite: an algorithm's comparisons treat NaN as a low score, without an error."""
    for batch in scored:
        finite = batch["scores"].isfinite() | ~has_reward(batch)
        if not finite.all():
            row = int((~finite).int().argmax())
            first = f"the first, of uid={batch['uid'][row]}, is {float(batch['scores'][row])}"
            raise DataError(f"{int((~finite).sum())} of {len(batch)} scores are not finite; {first}. Fix the reward")


def _numbers(returned: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise DataError(f"the algorithm's step returned {type(returned).__name__}; it must return a mapping of metrics")
    for name, value in returned.items():
        if not isinstance(value, Real):
            raise DataError(f"the algorithm's step returned {name}={value!r}; a metric must be a number")
    return {name: float(value) for name, value in returned.items()}
