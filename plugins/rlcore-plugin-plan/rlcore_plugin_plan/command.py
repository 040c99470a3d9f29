"""The command `rlcore plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import yaml

from rlcore import CommandLine, Config, ConfigError
from rlcore_plugin_plan import report
from rlcore_plugin_plan.overrides import experiment
from rlcore_plugin_plan.plans import make_plans
from rlcore_plugin_plan.search import Plan


def run(line: CommandLine) -> int:
    """Plan, or measure this machine with `--calibrate`, and print the result."""
    options, config = line.options, line.compose()
    if options.calibrate:
        from rlcore_plugin_plan.calibrate import calibrate

        line.show(f"wrote {calibrate(config, line.plugins)}")
        return 0
    target = experiment_file(options.save) if options.save else None
    lengths = read_lengths(options.lengths, config.rollout.response_len) if options.lengths else []
    plans = make_plans(config, line.plugins, lengths=lengths, objective=options.objective)
    if target is not None:
        save(plans[0], config, target)
    given = [word for word in line.overrides if not word.startswith("plan.")]
    as_json = options.json
    line.show(json.dumps(report.as_json(plans, config), indent=2) if as_json else report.text(plans, config, given))
    return 0


def read_lengths(spelled: str, most: int) -> list[int]:
    """Read response lengths: comma-separated numbers, or a file of numbers. Raises ConfigError for anything else."""
    text = spelled
    if not spelled.replace(",", "").replace(" ", "").isdigit():
        try:
            text = Path(spelled).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--lengths {spelled}: neither numbers, as 200,400,900, nor a file: {error}") from error
    parts = text.replace(",", " ").split()
    wrong = [part for part in parts if not part.isdigit() or not 1 <= int(part) <= most]
    if wrong or not parts:
        given = repr(wrong[0]) if wrong else "an empty text"
        raise ConfigError(
            f"--lengths {spelled}: {given} is not a response length; give whole numbers from 1 to "
            f"rollout.response_len={most}"
        )
    lengths = sorted(map(int, parts))
    # The search evaluates every length; 100 quantiles give practically the same means.
    if len(lengths) > 100:
        lengths = [lengths[math.floor((index + 0.5) * len(lengths) / 100)] for index in range(100)]
    return lengths


def experiment_file(name: str) -> Path:
    """Return the path of the experiment to write. Raises ConfigError for a name without the ending .yaml."""
    if Path(name).suffix != ".yaml":
        raise ConfigError(f"--save {name}: an experiment is a file NAME.yaml, as configs/experiment/big.yaml")
    return Path(name)


def save(plan: Plan, config: Config, path: Path) -> None:
    """Write the plan as an experiment, `experiment=NAME` in a folder DIR/experiment for `--config-dir DIR`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(experiment(plan, config), sort_keys=False, width=110)
    path.write_text(
        f"# @package _global_\n# {plan.seconds:.3g} s a step, by `rlcore plan`.\n{content}", encoding="utf-8"
    )
