"""The comparison of two runs or models on the same held-out prompts, or of two trainings: `rlcore compare A B`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config import Config, from_yaml, same_run
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.trackers.jsonl import METRICS, read_lines
from rlcore.training.checkpoint import split_target
from rlcore.training.estimates import Estimate, mean_with_interval
from rlcore.training.evaluate import Evaluation, PreparedTarget, prepare_target, prompt_keys
from rlcore.training.folder import CONFIG

MEASURE = (
    *("reward.", "rollout.", "env.", "eval.sets.", "trainer.eval_samples", "trainer.eval_temperature"),
    *("data.system_prompt", "data.answer_key"),
)
"""Beginnings of the keys that change an evaluation's numbers."""

OF_STEPS = ("reward/mean", "reward/accuracy")
"""The metrics of a training step that are compared."""

Lines = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Difference:
    """A metric over the pairs that two evaluations or trainings share, prompts or steps: means, second minus first."""

    first: float
    second: float
    difference: Estimate
    pairs: int


def compare(targets: list[Path], configs: list[Config], plugins: PluginManager) -> dict[str, Difference]:
    """Evaluate two targets one after the other, print their differences by metric, and return them.

    A metric of an evaluation of `eval.sets` that both have is SET/NAME.

    Raises ConfigError before the first evaluation for an algorithm with an evaluation of its own and for two that share
    fewer than two prompts, and the errors of `prepare_target`, of the evaluations and of `differences`.
    """
    for target, config in zip(targets, configs, strict=True):
        if (
            config.eval.held_out
            and config.algorithm
            and plugins.algorithm(config.algorithm).algorithm(config.algo).evaluates
        ):
            raise ConfigError(
                f"{target} is a run of algo={config.algorithm}, whose own evaluation has no values by prompt; "
                f"compare the models in its checkpoints, as {split_target(target)[0]}/checkpoints/step_NUMBER/actor/"
                "model"
            )
    prepared = [prepare_target(target, config, plugins) for target, config in zip(targets, configs, strict=True)]
    check_shared_prompts(*prepared)
    first, second = (each.run() for each in prepared)
    rows: dict[str, Difference] = {}
    for name in first:
        if name in second:
            with prepared[0].naming(name):
                of_set = differences(first[name], second[name])
            rows |= {f"{name}/{metric}" if name else metric: row for metric, row in of_set.items()}
    print(f"A: {targets[0]}\nB: {targets[1]}")
    if keys := measured_differently(*configs):
        print(f"A and B differ in {', '.join(keys)}; an override makes them equal: KEY=VALUE holds for both")
    _show(rows, "prompts")
    return rows


def compare_training(runs: list[Path], plugins: PluginManager) -> dict[str, Difference]:
    """Print the differences of two runs' training rewards and accuracies over the steps that both have; return them.

    Nothing is sampled: the numbers are those of metrics.jsonl. Raises ConfigError for a folder without a run, and for
    runs that share fewer than two steps.
    """
    for run in runs:
        if not (run / CONFIG).is_file():
            raise ConfigError(f"{run} holds no run ({CONFIG}); rlcore compare --training needs the folders of two runs")
    first, second = ({line["step"]: line for line in read_lines(run / METRICS)} for run in runs)
    rows = step_differences(first, second)
    if not rows:
        raise ConfigError(
            f"{runs[0]} and {runs[1]} share fewer than two steps with {' or '.join(OF_STEPS)}; they have steps "
            f"{_range(first)} and {_range(second)}. Compare the models instead: rlcore compare A B"
        )
    configs = [from_yaml((run / CONFIG).read_text(encoding="utf-8"), plugins) for run in runs]
    print(f"A: {runs[0]}\nB: {runs[1]}\nA and B differ in {', '.join(same_run(*configs)) or 'no key'}")
    _show(rows, "steps")
    return rows


def step_differences(first: Lines, second: Lines) -> dict[str, Difference]:
    """Return the paired difference of each metric of OF_STEPS over the steps that both have, with its 95 % interval.

    first, second: the lines of metrics.jsonl by step. A step without a finite number in one of the two is left out, and
    a metric with fewer than two steps. The interval takes the steps' differences as independent.
    """
    rows = {}
    for name in OF_STEPS:
        steps = [step for step in first if step in second]
        pairs = [(_number(first[step].get(name)), _number(second[step].get(name))) for step in steps]
        pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
        if len(pairs) >= 2:
            rows[name] = _difference(pairs, [str(number) for number in range(len(pairs))])
    return rows


def _number(value: Any) -> float:
    """Return a metric as JSON holds it, "nan" and "inf" included; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _range(steps: Mapping[int, object]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "(none)"


def _show(rows: Mapping[str, Difference], unit: str) -> None:
    width = max([10, *map(len, rows)])
    for name, row in rows.items():
        difference = row.difference
        print(
            f"{name:<{width}} A {row.first:<8.4g} B {row.second:<8.4g} B - A {difference.value:<+9.4g} "
            f"95 % interval {difference.low:+.4g} to {difference.high:+.4g} "
            f"(standard error {difference.error:.4g}, {row.pairs} {unit})"
        )


def measured_differently(first: Config, second: Config) -> list[str]:
    """Return the keys in which two configs differ and that change an evaluation's numbers on the same model."""
    return [key for key in same_run(first, second) if key.startswith(MEASURE)]


def check_shared_prompts(first: PreparedTarget, second: PreparedTarget) -> None:
    """Raise ConfigError where an evaluation of both shares fewer than two prompts, or where they share no evaluation.

    Prompts are the same if their uid is, and their messages or else their text.
    """
    names = [name for name in first.prompts if name in second.prompts]
    if not names:
        of_first, of_second = (
            ", ".join(name or "the run's own" for name in each.prompts) or "none" for each in (first, second)
        )
        raise ConfigError(
            f"the two have no evaluation in common: {of_first} and {of_second}; give both the same eval.held_out and "
            "eval.sets"
        )
    for name in names:
        left, right = (prompt_keys(each.prompts[name]) for each in (first, second))
        with first.naming(name):
            _check_enough(len(set(left) & set(right)), len(left), len(right))


def _check_enough(shared: int, first: int, second: int) -> None:
    if shared < 2:
        raise ConfigError(
            f"the two evaluations share {shared} of their prompts ({first} and {second}), and a difference needs two; "
            "give both the same data, as data=file data.path=FILE"
        )


def differences(first: Evaluation, second: Evaluation) -> dict[str, Difference]:
    """Return the paired difference of each metric that both evaluations have by prompt, with its 95 % interval.

    Prompts are the same if uid, seat, and messages or else text are; a prompt without a reward in one of the two is
    left out. As the difficulty of a prompt is in both, the interval is mostly narrower than the two intervals suggest
    (arXiv 2411.00640, paired differences). Raises ConfigError when fewer than two prompts are shared.
    """
    rows = {}
    for name, values in first.by_prompt.items():
        others = second.by_prompt.get(name, {})
        shared = [prompt for prompt in values if prompt in others]
        clusters = [uid for uid, _, _ in shared]
        prompts = len(set(clusters))
        if name == "accuracy":
            _check_enough(prompts, len({uid for uid, _, _ in values}), len({uid for uid, _, _ in others}))
        if prompts < 2:
            continue
        rows[name] = _difference([(values[prompt], others[prompt]) for prompt in shared], clusters)
    return rows


def _difference(pairs: Sequence[tuple[float, float]], clusters: Sequence[str]) -> Difference:
    """Return the difference over pairs of values; those of a cluster, such as the seats of a game, count together."""
    first, second = zip(*pairs, strict=True)
    differences = [after - before for before, after in pairs]
    estimate = mean_with_interval(differences, clusters)
    return Difference(sum(first) / len(pairs), sum(second) / len(pairs), estimate, len(set(clusters)))
