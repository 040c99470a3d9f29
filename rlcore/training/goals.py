"""The best evaluation of a run, `trainer.best`, and the one that ends it early, `trainer.stop_at`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlcore.config import Config
from rlcore.config.eval_sets import set_config, source_config
from rlcore.config.schema import TrainerConfig
from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins import Algorithm
from rlcore.training.evaluate import OWN, metric_names
from rlcore.training.length import is_better, reaches, still_ends

log = logging.getLogger(__name__)


class Goals:
    """The best evaluation so far, and the one that reached `trainer.stop_at`. Both are part of the checkpoints.

    best: {"step": number, "value": the metric `trainer.best` there}; None before the first evaluation.
    reached: the metrics of `trainer.stop_at` at the evaluation that reached them; None before it.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self.best: dict[str, float] | None = None
        self.reached: dict[str, float] | None = None

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation."""
        return None if self.best is None else int(self.best["step"])

    def judge(self, step: int, metrics: Mapping[str, float], *, by_algorithm: bool = False) -> None:
        """Compare an evaluation with the best so far and with `trainer.stop_at`.

        Of equal ones the first is the best; NaN never is. An evaluation without a metric, as without pass@k where
        rewards failed, is warned of and not judged by it. by_algorithm: the evaluation is the algorithm's own, whose
        metrics nobody knew before; then a missing one raises ConfigError before the first step, listing the metrics.
        """
        best, goals = self._config.best, self._config.stop_at
        for name in dict.fromkeys([*goals, *([] if best is None else [best])]):
            if name not in metrics and step == 0 and by_algorithm and f"eval/{_set_of(name)}/samples" not in metrics:
                raise _unknown(self._config, name, [metric for metric in metrics if metric.startswith("eval/")])
            if name not in metrics:
                log.warning("step %d: the evaluation gave no %s, so it is not judged by it", step, name)
        if best is not None and self._is_best(best, metrics.get(best, math.nan)):
            self.best = {"step": step, "value": metrics[best]}
            log.info("step %d is the best so far: %s = %g", step, best, metrics[best])
        if reaches(self._config, metrics):
            self.reached = {name: metrics[name] for name in goals}
            log.info("step %d reaches trainer.stop_at = %s: the run ends", step, goals)

    def _is_best(self, name: str, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return is_better(self._config, name, value, self.best["value"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self.best, "reached": self.reached}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Take the state of the checkpoint of `step`; an empty one, of a version without goals, has none yet.

        What has reached another `trainer.stop_at`, or that of a shorter run, is judged again.
        """
        self.best, reached = state.get("best"), state.get("reached")
        self.reached = reached if reached and still_ends(self._config, step, reached) else None


def check_goals(config: Config, algorithm: Algorithm, extracts: Mapping[str, bool]) -> None:
    """Raise ConfigError for a metric of `trainer.best` or `trainer.stop_at` that no evaluation of this run gives.

    extracts: by the name of each evaluation, OWN, a source of `data.mix` or one of `eval.sets`, whether a reward
    extracts answers, so that there is maj@k. The metrics of an algorithm with an evaluation of its own are known after
    the first one only.
    """
    trainer = config.trainer
    names = dict.fromkeys(trainer.stop_at, "trainer.stop_at")
    if trainer.best is not None:
        names[trainer.best] = "trainer.best"
    for name in trainer.lower_is_better:
        if name not in names:
            raise ConfigError(
                f"trainer.lower_is_better names {name!r}, which is neither trainer.best nor in trainer.stop_at; they "
                f"have {', '.join(names) or 'no metric'}"
            )
    for name, goal in trainer.stop_at.items():
        _check_goal(name, goal)
    for name, key in names.items():
        if not trainer.eval_every:
            raise ConfigError(f"{key} needs evaluations, but trainer.eval_every = 0; set it to the steps between them")
        if config.eval.held_out and algorithm.evaluates and _set_of(name) not in config.eval.sets:
            if not name.startswith("eval/"):
                raise ConfigError(f"{key} names {name!r}; metrics of evaluations begin with eval/, e.g. eval/accuracy")
        elif name not in (known := _known_metrics(config, algorithm, extracts)):
            raise _unknown(trainer, name, known, config.data.mix)


def _check_goal(name: str, goal: float) -> None:
    """Raise ConfigError for a value of `trainer.stop_at` that the metric never reaches."""
    if not math.isfinite(goal):
        raise ConfigError(f"trainer.stop_at.{name} = {goal} is never reached; give a number")
    is_share = re.fullmatch(r"eval/([\w-]+/)?(accuracy|truncated|(pass|maj)@\d+)(_low|_high)?", name) is not None
    if is_share and not 0 <= goal <= 1:
        raise ConfigError(f"trainer.stop_at.{name} = {goal:g}: it is a share of 0 to 1; 90 % is 0.9")


def _set_of(metric: str) -> str:
    """Return the SET of eval/SET/NAME; OWN for another metric."""
    parts = metric.split("/")
    return parts[1] if len(parts) == 3 else OWN


def _known_metrics(config: Config, algorithm: Algorithm, extracts: Mapping[str, bool]) -> list[str]:
    """Return the metrics of all evaluations but the algorithm's own."""
    names = []
    if config.eval.held_out and not algorithm.evaluates:
        for name in config.data.mix:
            names += metric_names(source_config(config, name), extracts[name], name)
        if not config.data.mix:
            names += metric_names(config, extracts[OWN])
    for name in config.eval.sets:
        names += metric_names(set_config(config, name), extracts[name], name)
    return names


def _unknown(trainer: TrainerConfig, name: str, known: Sequence[str], sources: Collection[str] = ()) -> ConfigError:
    """Return the error for a metric that no evaluation gives; sources: the names in `data.mix`."""
    key = "trainer.best" if name == trainer.best else "trainer.stop_at"
    has_run_samples = _set_of(name) in (OWN, *sources)
    needs, samples = "", "trainer.eval_samples" if has_run_samples else f"eval.sets.{_set_of(name)}.samples"
    if "/pass@" in name:
        needs = f" pass@k needs {samples} of at least k, which is a power of two."
    if "/maj@" in name:
        needs = f" maj@k needs {samples} of at least k, a power of two, and a reward that extracts answers."
    shown = [metric for metric in known if not metric.endswith(("_low", "_high"))]
    return ConfigError(
        f"{key} names {name!r}, which no evaluation of this run gives.{did_you_mean(name, known)}{needs} "
        f"There are {', '.join(shown)}"
    )
