"""The learning rate as a function of the run's step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from rlcore.config import EngineConfig


def learning_rate(config: EngineConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of step 0, 1, ...: linear warm-up over `warmup_steps`, then the schedule.

    The schedule goes from `lr` at the end of the warm-up to `lr * min_lr_ratio` after the last step.
    """
    # step + 1, so that the first step already learns; the rate reaches `lr` at step `warmup_steps`.
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
