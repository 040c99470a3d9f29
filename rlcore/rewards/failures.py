"""Rows without a reward: they leave the batch, and a call with too many of them ends the run."""

from __future__ import annotations

from torch import Tensor

from rlcore.errors import RewardsError
from rlcore.ops import group_index
from rlcore.protocol import DataProto


def has_reward(scored: DataProto) -> Tensor:
    """Return bool [rows] of the rows with a score: all but those that failed, unless `reward.error_value` is a number.

    `scored` has the columns `scores` and `reward_error` of a reward worker.
    """
    failed: Tensor = scored.view("reward_error")
    return ~failed if not failed.any() else ~(failed & scored.view("scores").isnan())


def left_alone(present: Tensor, group: Tensor) -> Tensor:
    """Return bool [rows]: the row is present, and all others of its group, one or more, are not.

    `present` is bool [rows], `group` int64 [rows]. Such a row has nothing left to be compared with.
    """
    sizes, left = group.bincount()[group], group.bincount(weights=present.double())[group]
    return present & (left == 1) & (sizes > 1)


def with_reward(batch: DataProto, scored: DataProto, max_failures: float) -> DataProto:
    """Return the rows of `scored` that have a reward, as a batch whose union with `batch` keeps these rows only.

    A row that is left alone of its group (rows of equal `uid`) goes too. Raises RewardsError as `check_failures` does.
    """
    check_failures(batch, scored, max_failures)
    present = has_reward(scored)
    if not present.all() and "uid" in batch:
        present &= ~left_alone(present, group_index(batch.view("uid")))
        if not present.any():
            raise RewardsError(f"rewards failed in every group, and none has two rows left: {_first(batch, scored)}")
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
        raise RewardsError(f"all {failed} samples of one call have no reward: {_first(batch, scored)}")
    if failed > max_failures * len(scored):
        raise RewardsError(
            f"{failed} of {len(scored)} samples of one call have no reward, more than "
            f"reward.max_failures={max_failures:g} of them: {_first(batch, scored)}"
        )


def _first(batch: DataProto, scored: DataProto) -> str:
    """Describe the first row without a reward."""
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
