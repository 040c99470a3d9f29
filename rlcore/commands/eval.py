"""`rlcore eval`: accuracy of a run's newest checkpoint or of a model folder, or the difference of two."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine

if TYPE_CHECKING:
    from rlcore.config import Config

RLCORE_API = 1


def run(line: CommandLine) -> int:
    """Evaluate the run, checkpoint or model folder given as the first word, or compare the first two."""
    targets, overrides = split_words(line)
    if len(targets) > 2:
        raise ConfigError(
            f"rlcore eval compares two runs or models at a time, and {', '.join(targets)} are {len(targets)}; compare "
            "them in pairs"
        )
    if not targets:
        raise ConfigError(
            "the first word must be a run or model folder: rlcore eval RUN_OR_MODEL [OVERRIDE ...]; two are compared: "
            "rlcore eval RUN_OR_MODEL RUN_OR_MODEL [OVERRIDE ...]"
        )
    if len(targets) == 2:
        compare_models(line, targets, overrides)
        return 0
    config = _checked_config(line, targets[0], overrides)
    from rlcore.training.evaluate import evaluate

    evaluate(Path(targets[0]), config, line.plugins)
    return 0


def split_words(line: CommandLine) -> tuple[list[str], list[str]]:
    """Return the runs and models that the words begin with, and the overrides after them.

    Raises ConfigError for a run or model after an override.
    """
    targets = list(itertools.takewhile(_is_target, line.overrides))
    overrides = line.overrides[len(targets) :]
    if targets and (late := [word for word in overrides if _is_target(word)]):
        raise ConfigError(
            f"{late[0]!r} comes after the override {overrides[0]!r}; put runs and models before overrides, and "
            "write an override as KEY=VALUE"
        )
    return targets, overrides


def compare_models(line: CommandLine, targets: list[str], overrides: list[str]) -> None:
    """Evaluate two runs or models, and print their paired differences."""
    configs = [_checked_config(line, target, overrides) for target in targets]
    from rlcore.training.compare import compare

    compare([Path(target) for target in targets], configs, line.plugins)


def _is_target(word: str) -> bool:
    """Whether a word names a run or model, also a folder such as `lr=1e-5`, and not an override."""
    return ("=" not in word and not word.startswith("~")) or os.path.exists(word)


def _checked_config(line: CommandLine, target: str, overrides: list[str]) -> Config:
    """Return the config of an evaluation of the target, after the checks that need no data."""
    from rlcore.training.checkpoint import split_target
    from rlcore.training.folder import require_plugins
    from rlcore.training.preflight import preflight

    require_plugins(split_target(Path(target))[0], line.plugins)
    config = line.compose(overrides, base={**(line.saved() or {}), **target_values(target)})
    preflight(config, line.plugins, "evaluate")
    return config


def target_values(target: str) -> dict[str, Any]:
    """Return the saved config of a run folder or of a checkpoint's run, or a config with a model or an adapter."""
    from rlcore.adapter_folder import AdapterFolder, is_adapter
    from rlcore.config.files import read_values
    from rlcore.hub import split_name
    from rlcore.training.checkpoint import split_target

    folder, _ = split_target(Path(target))
    if (folder / "config.yaml").is_file():
        return read_values(folder / "config.yaml")
    if is_adapter(folder):
        template = folder / "chat_template.jinja"
        return {
            "model": {
                "path": AdapterFolder(folder).base,
                "lora": {"path": target},
                "chat_template": str(template) if template.is_file() else None,
            }
        }
    if (folder / "config.json").is_file() or target == "tiny" or split_name(target) is not None:
        return {"model": {"path": target}}
    if folder.is_dir():
        raise ConfigError(
            f"{target!r} holds neither config.yaml (a run) nor config.json (a Hugging Face model) nor "
            "adapter_config.json (a LoRA adapter)"
        )
    raise ConfigError(
        f"{target!r} does not exist: it must be a folder with config.yaml (a run) or config.json (a Hugging Face "
        "model), or the name of a model on the hub, ORG/NAME"
    )


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore eval`."""
    return CommandSpec("eval", SUMMARIES["eval"], run=run, usage="RUN_OR_MODEL")
