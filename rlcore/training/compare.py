"""The comparison of two runs or models on the same held-out prompts: `rlcore eval RUN_A RUN_B`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import Config
from rlcore.config.eval_sets import naming_set
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.estimates import Estimate, clustered_error, mean_with_interval
from rlcore.training.evaluate import Evaluation, evaluate_target


@dataclass(frozen=True)
class Difference:
    """A metric of two evaluations over the prompts that both have: its means, and second minus first.

    error: the standard error of the difference. prompts: number of prompts.
    """

    first: float
    second: float
    difference: Estimate
    error: float
    prompts: int


def compare(targets: list[Path], configs: list[Config], plugins: PluginManager) -> dict[str, Difference]:
    """Evaluate two targets one after the other, print their differences by metric, and return them.

    A metric of an evaluation of `eval.sets` that both have is SET/NAME.

    Raises ConfigError before the first evaluation for an algorithm with an evaluation of its own, and the errors of
    `evaluate_target` and `differences`.
    """
    for target, config in zip(targets, configs, strict=True):
        if (
            config.eval.held_out
            and config.algorithm
            and plugins.algorithm(config.algorithm).algorithm(config.algo).evaluates
        ):
            raise ConfigError(
                f"{target} is a run of algo={config.algorithm}, whose own evaluation has no values by prompt; "
                f"compare the models in its checkpoints, as {target}/checkpoints/step_NUMBER/actor/model"
            )
    first, second = (evaluate_target(target, config, plugins) for target, config in zip(targets, configs, strict=True))
    found: dict[str, Difference] = {}
    for name in first:
        if name in second:
            with naming_set(name) if name else nullcontext():
                rows = differences(first[name], second[name])
            found |= {f"{name}/{metric}" if name else metric: row for metric, row in rows.items()}
    print(f"A: {targets[0]}\nB: {targets[1]}")
    width = max([10, *map(len, found)])
    for name, row in found.items():
        low, high = row.difference.low, row.difference.high
        print(
            f"{name:<{width}} A {row.first:<8.4g} B {row.second:<8.4g} B - A {row.difference.value:<+9.4g} "
            f"95 % interval {low:+.4g} to {high:+.4g} (standard error {row.error:.4g}, {row.prompts} prompts)"
        )
    return found


def differences(first: Evaluation, second: Evaluation) -> dict[str, Difference]:
    """Return the paired difference of each metric that both evaluations have by prompt, with its 95 % interval.

    Prompts are the same if uid, seat and text are; a prompt without a reward in one of the two is left out. As the
    difficulty of a prompt is in both, the interval is mostly narrower than the two intervals suggest (arXiv
    2411.00640, paired differences). Raises ConfigError when fewer than two prompts are shared.
    """
    found = {}
    for name, of_first in first.by_prompt.items():
        of_second = second.by_prompt.get(name, {})
        shared = [prompt for prompt in of_first if prompt in of_second]
        clusters = [uid for uid, _, _ in shared]
        if name == "accuracy" and len(set(clusters)) < 2:
            raise ConfigError(
                f"the two evaluations share {len(set(clusters))} of their prompts ({len(of_first)} and "
                f"{len(of_second)}), and a difference needs two; give both the same data, as data=file data.path=FILE"
            )
        if len(set(clusters)) < 2:
            continue
        before = [of_first[prompt] for prompt in shared]
        after = [of_second[prompt] for prompt in shared]
        change = [b - a for a, b in zip(before, after, strict=True)]
        found[name] = Difference(
            sum(before) / len(shared),
            sum(after) / len(shared),
            mean_with_interval(change, clusters),
            clustered_error(change, clusters),
            len(set(clusters)),
        )
    return found
