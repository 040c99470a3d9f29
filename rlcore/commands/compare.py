"""`rlcore compare`: the paired differences of two runs or models, on held-out prompts or in training."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlcore import CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.eval import compare_models, split_words
from rlcore.commands.line import CommandLine

RLCORE_API = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    training_help = "compare the rewards of training, step by step, and sample nothing"
    parser.add_argument("--training", action="store_true", help=training_help)


def run(line: CommandLine) -> int:
    """Compare the two runs or models given as the first words."""
    targets, overrides = split_words(line)
    if len(targets) != 2:
        raise ConfigError(
            f"rlcore compare needs two runs or models, and {', '.join(targets) or 'none'} was given: "
            "rlcore compare A B [--training] [OVERRIDE ...]"
        )
    if not line.options.training:
        compare_models(line, targets, overrides)
        return 0
    if overrides or line.options.config or line.options.config_dir:
        raise ConfigError(
            "rlcore compare --training reads what two runs have written; leave out overrides and --config"
        )
    from rlcore.training.compare import compare_training

    compare_training([Path(target) for target in targets], line.plugins)
    return 0


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore compare`."""
    return CommandSpec("compare", SUMMARIES["compare"], run=run, options=add_options, usage="A B")
