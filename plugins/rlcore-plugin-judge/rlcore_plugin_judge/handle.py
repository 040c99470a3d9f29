"""The controller's side of the judge: the handle that `run.group("judge")` returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from rlcore import Config, DataError, DataProto, RewardsError
from rlcore.workers import WorkerGroup
from rlcore_plugin_judge.config import JudgeConfig

_log = logging.getLogger(__name__)


class Judge:
    """Compares responses, and counts the step's pairs for the metrics."""

    def __init__(self, group: WorkerGroup, config: Config) -> None:
        self._group, self._config = group, config.section(JudgeConfig)
        self._compared: list[DataProto] = []

    def compare(self, first: DataProto, second: DataProto) -> DataProto:
        """Return the judge's preference for each row: `preference` (fp32) and `judge_error` (bool), [rows].

        1: the response of `first` is better, 0: that of `second`, 0.5: neither. Reads `prompt_text` and `response_text`
        of both, and returns at once. A pair without a verdict has `judge_error` and the preference of `judge.on_error`,
        and counts in the metric judge/errors. Raises DataError for batches whose rows do not belong together. The first
        use of the result waits for it, and raises RewardsError when the judge failed on more than the share
        `judge.max_failures` of the pairs.
        """
        if len(first) != len(second):
            raise DataError(f"judge: {len(first)} rows cannot be compared with {len(second)}, row by row")
        sides = [
            side.select([], ["prompt_text", "response_text"], []).rename("response_text", f"{name}_text")
            for name, side in (("first", first), ("second", second))
        ]
        compared: DataProto = self._group.compare(sides[0].union(sides[1]))
        checked = DataProto.deferred(lambda: self._checked(compared))
        self._compared.append(checked)
        return checked

    def _checked(self, compared: DataProto) -> DataProto:
        failed, config = int(compared["judge_error"].sum()), self._config
        if failed > config.max_failures * len(compared):
            raise RewardsError(
                f"the judge {config.model} at {config.url} failed on {failed} of {len(compared)} pairs of one call, "
                f"more than judge.max_failures={config.max_failures:g} of them (reasons: the judge's log). Mend the "
                "judge and run the same command again: it goes on from the last checkpoint"
            )
        return compared

    def end_step(self) -> Callable[[], Mapping[str, float]]:
        """Return a function that waits for the step's answers and returns its metrics.

        It warns when the judge decided no pair of a call.
        """
        compared, self._compared = self._compared, []
        return partial(self._metrics, compared)

    def _metrics(self, compared: Sequence[DataProto]) -> Mapping[str, float]:
        if not compared:
            return {}
        errors = torch.cat([batch["judge_error"] for batch in compared])
        # Equal texts are a tie without a question, so an outage leaves ties too.
        lost = [batch for batch in compared if batch["judge_error"].any() and not _decided(batch).any()]
        if lost:
            _log.warning(
                "the judge %s at %s decided no pair: it failed on %d of %d, which count as judge.on_error=%s "
                "(reasons: the judge's log)",
                self._config.model,
                self._config.url,
                sum(int(batch["judge_error"].sum()) for batch in lost),
                sum(map(len, lost)),
                self._config.on_error,
            )
        return {"judge/pairs": float(len(errors)), "judge/errors": float(errors.sum())}


def _decided(batch: DataProto) -> torch.Tensor:
    return ~batch["judge_error"] & (batch["preference"] != 0.5)
