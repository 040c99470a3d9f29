"""The rows of a call's episodes: the failed ones are left out, and counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rlcore.errors import EpisodesError
from rlcore.protocol import DataProto

log = logging.getLogger(__name__)

_PLAYED = ("episode_row", "episode_error")


class EpisodeCounts:
    """Joins the rows of episodes to those of their prompts, and counts the failed episodes of a step."""

    def __init__(self) -> None:
        self._played = self._failed = 0

    def kept(self, prompts: DataProto, played: DataProto, max_failures: float, call: int) -> DataProto:
        """Return the rows of the episodes that did not fail, with the other columns of their prompts.

        `prompts` has the column `sample_index`, `played` the columns of `rlcore.episodes.rows` and `episode_row`.
        `call`: the number of the call in its step, from 1. Raises EpisodesError when more than the share `max_failures`
        of the episodes failed, or all of them.
        """
        of_prompt: Sequence[int] = played["episode_row"].tolist()
        errors: Sequence[dict[str, Any] | None] = list(played["episode_error"])
        # A step's first call is the common one; the ids of further ones end with their number.
        end = "" if call == 1 else f"/{call}"
        ids = [
            f"{uid}/{index}{end}" for uid, index in zip(prompts["uid"], prompts["sample_index"].tolist(), strict=True)
        ]
        failed = [(ids[row], error) for row, error in zip(of_prompt, errors, strict=True) if error is not None]
        self._played += len(prompts)
        self._failed += len(failed)
        self._report(failed, len(prompts), max_failures)
        kept = [at for at, error in enumerate(errors) if error is None]
        rows = [of_prompt[at] for at in kept]
        found = [name for name in played.keys() if name not in _PLAYED]  # noqa: SIM118 (a batch is not a dict)
        own = [name for name in prompts.keys() if name not in found]  # noqa: SIM118
        batch = prompts.select(*_by_kind(prompts, own), list(prompts.meta_info))[rows].union(
            played.select(*_by_kind(played, found), [])[kept]
        )
        batch["episode"] = [ids[row] for row in rows]
        return batch

    def metrics(self) -> dict[str, float]:
        """Return the numbers of episodes played and failed since the last call; {} without any."""
        played, failed = self._played, self._failed
        self._played = self._failed = 0
        return {"episodes/played": float(played), "episodes/failed": float(failed)} if played else {}

    def _report(self, failed: Sequence[tuple[str, dict[str, Any]]], played: int, max_failures: float) -> None:
        if not failed:
            return
        name, error = failed[0]
        first = (
            f"the first, {name}, after {error['attempts']} attempts: {error['cause']}\n{error['traceback']}".rstrip()
        )
        if len(failed) > max_failures * played or len(failed) == played:
            raise EpisodesError(
                f"{len(failed)} of {played} episodes failed, more than env.max_failures={max_failures:g} of them; "
                f"{first}\nMend the environment and run the same command again: it goes on from the last checkpoint"
            )
        log.warning("%d of %d episodes failed and are left out; %s", len(failed), played, first)


def _by_kind(batch: DataProto, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of tensor columns and those of object columns."""
    objects = set(batch.non_tensor_batch.keys())
    return [name for name in names if name not in objects], [name for name in names if name in objects]
