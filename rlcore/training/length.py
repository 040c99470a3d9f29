"""How far a run goes: `trainer.total_steps`, `trainer.stop_at`, and a finished run that goes on with new ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config import Config
from rlcore.config.schema import TrainerConfig
from rlcore.errors import ConfigError


def is_better(trainer: TrainerConfig, name: str, value: float, than: float) -> bool:
    """Whether one value of a metric is better than another, by `trainer.lower_is_better`."""
    return value < than if name in trainer.lower_is_better else value > than


def reaches(trainer: TrainerConfig, metrics: Mapping[str, float]) -> bool:
    """Whether these metrics reach all of `trainer.stop_at`, which has to name one."""
    goals = trainer.stop_at
    return bool(goals) and all(
        name in metrics and (metrics[name] == goal or is_better(trainer, name, metrics[name], goal))
        for name, goal in goals.items()
    )


def still_ends(trainer: TrainerConfig, step: int, reached: Mapping[str, float]) -> bool:
    """Whether an evaluation that ended the run after `step` ends it with these settings too.

    reached: the metrics of `trainer.stop_at` there. It does not if it took place only because the step was the last.
    """
    is_due = step == trainer.total_steps or (trainer.eval_every > 0 and step % trainer.eval_every == 0)
    return is_due and reaches(trainer, reached)


def check_goes_on(path: Path, summary: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError, saying what is allowed, when a finished run has no step left with this config.

    summary: the content of its summary.json.
    """
    trainer, step, reached = config.trainer, int(summary["steps"]), summary.get("stopped_at") or {}
    if still_ends(trainer, step, reached):
        raise ConfigError(
            f"run.dir={path} holds a finished run: step {step} reached trainer.stop_at = {trainer.stop_at} (there "
            f"{reached}). To go on, give a trainer.stop_at beyond that, or none; or give another folder"
        )
    if trainer.total_steps <= step:
        given, more = f"trainer.total_steps = {trainer.total_steps}", f"trainer.total_steps of at least {step + 1}"
        if trainer.epochs is not None:
            given = f"trainer.epochs = {trainer.epochs}, which are {trainer.total_steps} steps"
            more = f"more than {step * trainer.epochs // trainer.total_steps} trainer.epochs"
        raise ConfigError(
            f"run.dir={path} holds a finished run of {step} steps, and {given}. To go on, give {more}; or give another "
            "folder"
        )


def length_lines(saved: Config, config: Config, step: int) -> list[str]:
    """Return the lines that say how the length of a run, which goes on after `step`, has changed."""
    before, after = saved.trainer, config.trainer
    lines = []
    if before.total_steps != after.total_steps:
        lines.append(
            f"goes on after step {step} to step {after.total_steps}; trainer.total_steps was {before.total_steps}"
        )
        if config.engine.schedule != "constant":
            lines.append(
                f"engine.schedule={config.engine.schedule}: the learning rate from step {step + 1} on is that of a run "
                f"of {after.total_steps} steps, and that of the steps before was that of {before.total_steps}"
            )
    if before.stop_at != after.stop_at:
        lines.append(f"goes on after step {step} with trainer.stop_at={after.stop_at}, which was {before.stop_at}")
    return lines
