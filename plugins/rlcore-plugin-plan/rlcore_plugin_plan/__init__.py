"""Automatic placement and parallel layout of any algorithm (HybridFlow, arXiv 2409.19256, section 6).

`record` finds an algorithm's dataflow by running its step once on a tiny model. From a device profile, `training`,
`inference` and `generation` give the seconds of a call and `memory` the bytes of a role; `search` finds the best
placement. This module is the plugin; it imports the others when they are used.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlcore import CommandSpec, Config, ConfigSpec, hookimpl
from rlcore_plugin_plan.config import PlanConfig

if TYPE_CHECKING:
    from rlcore import CommandLine, PluginManager

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rlcore plan`."""
    parser.add_argument("--json", action="store_true", help="print all plans as JSON")
    parser.add_argument("--save", metavar="FILE.yaml", help="write the best plan as an experiment")
    parser.add_argument("--lengths", metavar="N,N,...|FILE", help="response lengths, all equally likely")
    parser.add_argument("--objective", choices=["time", "cost"], default="time", help="least time or dollars of a step")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine, as the profile plan.device")


def run(line: CommandLine) -> int:
    """Run `rlcore plan`."""
    from rlcore_plugin_plan.command import run

    return run(line)


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore plan`."""
    summary = "find the best placement and layouts: rlcore plan algo=NAME plan.gpus=64 [OVERRIDE ...]"
    return CommandSpec("plan", summary, run=run, options=add_options)


@hookimpl
def rlcore_configs() -> ConfigSpec[PlanConfig]:
    """Register the keys `plan.*`."""
    return ConfigSpec("plan", PlanConfig)


@hookimpl
def rlcore_place_roles(config: Config, plugins: PluginManager) -> Config:
    """Plan for the configured or detected devices, print the plan, and return the config that runs it."""
    from rlcore_plugin_plan.overrides import values
    from rlcore_plugin_plan.plans import make_plans
    from rlcore_plugin_plan.report import text

    plans = make_plans(config, plugins)
    print(text(plans, config, []), flush=True)
    return config.with_values(values(plans[0], config))
