"""How far the two engines' log-probs of the samples are apart: warned of, and the end of a run where it has jumped."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from rlcore.config import Config

log = logging.getLogger(__name__)

DIFF = "rollout/train_rollout_logprob_diff"
SAME_WEIGHTS = "rollout/train_rollout_logprob_diff_same_weights"
TIMES = 5.0
"""By how many times the run's first difference may grow."""
FLOORS = {"bf16": 0.05, "fp32": 0.01}
"""Nats per dtype of the forward: a smaller difference never ends a run."""


class LogprobDiffWatch:
    """Judges each step's difference between the rollout engine's log-probs of its samples and training's, in nats.

    config: the policy's own. first: the difference of the run's first step on rows of the same weights; None before it.
    It is part of the checkpoints.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._warned_of = 0.0
        self.first: float | None = None

    @property
    def limit(self) -> float:
        """The difference on rows of the same weights from which on neither dtype nor engine explains it."""
        return max(TIMES * (self.first or 0.0), FLOORS[self._config.model.dtype])

    def warn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn when the engines' log-probs differ too much, and again when the difference doubles or becomes NaN."""
        gap = metrics.get(DIFF, 0.0)
        # Once a NaN was reported, `_warned_of` is infinite and no further warning comes.
        limit = self._config.trainer.train_rollout_logprob_diff
        is_larger = gap > max(limit, 2 * self._warned_of)
        is_new_nan = math.isnan(gap) and self._warned_of < math.inf
        if limit and (is_larger or is_new_nan):
            self._warned_of = math.inf if math.isnan(gap) else gap
            log.warning("step %d: %s", step, warning(gap, self._config))

    def judge(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return why the run must end, "" where it may go on.

        Nothing is judged where the two differ by design (`differs_by_design`), without rows of the same weights, as
        with trainer.rollouts_ahead, and with trainer.train_rollout_logprob_diff=0.
        """
        gap = metrics.get(SAME_WEIGHTS)
        if gap is None or differs_by_design(self._config) or not self._config.trainer.train_rollout_logprob_diff:
            return ""
        if self.first is None and math.isfinite(gap):
            self.first = gap
        if gap <= self.limit:
            return ""
        dtype, name = self._config.model.dtype, f"rollout={self._config.rollout.name}"
        if math.isnan(gap):
            found = "the log-probs of the samples, by the rollout engine or by training, are NaN"
        else:
            found = (
                f"the rollout engine's log-probs of samples of the same weights differ from training's by {gap:.3g} "
                f"nats on average, more than {self.limit:.3g}, which is {TIMES:g} times the {self.first or 0.0:.3g} of "
                f"the run's start, and at least {FLOORS[dtype]:g} in {dtype}"
            )
        return (
            f"step {step}: {found}. The weights had arrived, so {name} uses them wrongly, or training does: a "
            f"position, a norm, a layout. Step {step} has trained on these samples, and the last checkpoint is from "
            "before it. Test both engines by `rlcore plugins test`; the same command then goes on from that "
            "checkpoint, with trainer.train_rollout_logprob_diff=0 also where the difference is this large"
        )


def differs_by_design(config: Config) -> str:
    """Return why the two engines' log-probs of a sample differ although both are right; "" where they do not."""
    rollout = config.rollout
    cuts = {
        "temperature": rollout.temperature == 0,
        "top_p": rollout.top_p < 1,
        "top_k": rollout.top_k > 0,
        "min_tokens": rollout.min_tokens > 0,
    }
    if cut := ", ".join(f"rollout.{name}={getattr(rollout, name)}" for name, is_set in cuts.items() if is_set):
        return f"{cut} samples from part of the distribution, while training's log-probs cover all of it"
    if dropout := config.model.lora.dropout:
        return f"model.lora.dropout={dropout:g} drops a part of the adapter's inputs in training, and none in sampling"
    return ""


def warning(gap: float, config: Config) -> str:
    """Return the warning of a step in which the engines' log-probs differ by `gap` nats, with the likely cause.

    The likely cause is the first setting of the config that is known to make the two differ.
    """
    rollout, model, ahead = config.rollout, config.model, config.trainer.rollouts_ahead
    if math.isnan(gap):
        return (
            "the log-probs of the samples, by the rollout engine or by training, are NaN: "
            f"rollout={rollout.name} has wrong weights, or one of the two computes the model wrongly"
        )
    if by_design := differs_by_design(config):
        cause = by_design
    elif ahead:
        cause = f"trainer.rollouts_ahead samples with weights that are up to {ahead} steps old, and the policy moves"
    elif model.dtype == "bf16":
        cause = f"rollout={rollout.name} rounds bf16 differently than training; run with model.dtype=fp32 to verify"
    else:
        cause = (
            f"in fp32 the two compute the same, so rollout={rollout.name} has other weights than training, or one of "
            "them computes the model wrongly"
        )
    return (
        f"the rollout engine's log-probs of its samples differ from training's by {gap:.3g} nats on average, more "
        f"than trainer.train_rollout_logprob_diff = {config.trainer.train_rollout_logprob_diff:g}. "
        f"Likely cause: {cause}. "
        "trainer.importance=token, sequence or mask corrects the remaining difference (docs/rollout.md)"
    )
