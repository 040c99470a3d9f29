"""`rlcore plan`: the best placement and layouts for a run."""

from __future__ import annotations

import argparse
import json

from rlcore import CommandSpec, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine, show

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--json", action="store_true", help="print all plans as JSON")
    parser.add_argument("--save", metavar="FILE.yaml", help="write the best plan as an experiment")
    parser.add_argument("--lengths", metavar="N,N,...|FILE", help="response lengths, each as likely as the others")
    parser.add_argument("--objective", choices=["time", "cost"], default="time", help="least time or dollars of a step")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine, as the profile cluster.device")


def run(line: CommandLine) -> int:
    """Plan, or measure this machine with `--calibrate`, and print the result."""
    options, config = line.options, line.compose()
    from rlcore.plan import command, report

    if options.calibrate:
        from rlcore.plan.calibrate import calibrate

        show(f"wrote {calibrate(config, line.plugins)}")
        return 0
    target = command.experiment_file(options.save) if options.save else None
    lengths = command.read_lengths(options.lengths, config.rollout.response_len) if options.lengths else []
    plans = command.make_plans(config, line.plugins, lengths=lengths, objective=options.objective)
    if target is not None:
        command.save(plans[0], config, target)
    given = [word for word in line.overrides if not word.startswith(("cluster.gpus=", "cluster.device="))]
    if options.json:
        show(json.dumps(report.as_json(plans, config), indent=2))
    else:
        show(report.text(plans, config, given))
    return 0


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore plan`."""
    return CommandSpec("plan", SUMMARIES["plan"], run=run, options=add_options)
