"""Rows without a reward: they leave the batch, and a call with too many of them ends the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.errors import RewardsError
from rlcore.ops import episodes, group_index, group_means, one_row_each
from rlcore.protocol import DataProto


def has_reward(scored: DataProto) -> Tensor:
    """Return bool [rows] of the rows with a score: all but those that failed, unless `reward.error_value` is a number.

    `scored` has the columns `scores` and `reward_error` of a reward worker.
    """
    failed: Tensor = scored.view("reward_error")
    return ~failed if not failed.any() else ~(failed & scored.view("scores").isnan())


def one_score_each(batch: DataProto, scored: DataProto) -> DataProto:
    """Return `scored` with an episode's score in each of its rows that has a reward: the mean of theirs.

    `scored` has the scores of all rows of `batch`; a reward function's mean is over the rows to which it applies. Its
    other columns stay.
    """
    names = episodes(batch)
    if len(set(names)) == len(names):
        return scored
    scored, rows = scored[:], has_reward(scored).nonzero()[:, 0]
    own = [names[row] for row in rows.tolist()]
    for column in [each for each in scored.keys() if each.startswith("score")]:  # noqa: SIM118 (a batch is no dict)
        values = scored.view(column).clone()
        applies = torch.ones(len(rows)) if column == "scores" else (~values[rows].isnan()).float()
        means = group_means(torch.where(applies > 0, values[rows], 0.0), own, applies, episode=None)
        values[rows] = torch.where(group_means(applies, own, episode=None) > 0, means, math.nan).to(values.dtype)
        scored[column] = values
    return scored


def left_alone(present: Tensor, group: Tensor, episode: Sequence[str]) -> Tensor:
    """Return bool [rows]: the row's episode is present, and all others of its group, one or more, are not.

    `present` is bool [rows], `group` int64 [rows], `episode` the names that `rlcore.ops.episodes` returns. Such an
    episode has nothing left to be compared with.
    """
    first, place = one_row_each(episode)
    of_episode, played = group[first], torch.zeros(len(first), dtype=torch.float64)
    played[place[present]] = 1.0
    sizes, left = of_episode.bincount()[group], of_episode.bincount(weights=played)[group]
    return present & (left == 1) & (sizes > 1)


def with_reward(batch: DataProto, scored: DataProto, max_failures: float) -> DataProto:
    """Return the rows of `scored` that have a reward, as a batch whose union with `batch` keeps these rows only.

    An episode that is left alone of its group (rows of equal `uid`) goes too. Raises RewardsError as `check_failures`
    does.
    """
    check_failures(batch, scored, max_failures)
    present = has_reward(scored)
    if not present.all() and "uid" in batch:
        present &= ~left_alone(present, group_index(batch.view("uid")), episodes(batch))
        if not present.any():
            raise RewardsError(
                f"rewards failed in every group, and none has two rows left: {first_failure(batch, scored)}"
            )
    named = scored[:]
    if not present.all():  # rows leave, so that a union with other rows of the same number would not be noticed
        for name in ("uid", "sample_index"):
            if name in batch and name not in named:
                named[name] = batch[name]
    return named.keeping(present)


def check_failures(batch: DataProto, scored: DataProto, max_failures: float) -> None:
    """Raise RewardsError when more than the share `max_failures` of the rows have no reward, or none has one.

    `batch` has the texts of the rows, for the message.
    """
    failed = int(scored.view("reward_error").sum())
    if failed and failed == len(scored):
        raise RewardsError(f"all {failed} samples of one call have no reward: {first_failure(batch, scored)}")
    if failed > max_failures * len(scored):
        raise RewardsError(
            f"{failed} of {len(scored)} samples of one call have no reward, more than "
            f"reward.max_failures={max_failures:g} of them: {first_failure(batch, scored)}"
        )


def first_failure(batch: DataProto, scored: DataProto) -> str:
    """Return a text on the first row without a reward, of at least one: its names, cause, texts and traceback."""
    row = int(scored.view("reward_error").int().argmax())
    detail = scored.view("reward_detail")[row]
    texts = [
        f"its {name.removesuffix('_text')} is {batch.view(name)[row][-200:]!r}"
        for name in ("prompt_text", "response_text")
        if name in batch
    ]
    name = "/".join(str(detail[key]) for key in ("uid", "sample_index") if key in detail) or f"row {row}"
    cause = f"the first, {name}: {detail['function']} {detail['cause']}; {', '.join(texts)}"
    return f"{cause}\n{detail['traceback']}".rstrip()
