"""`rlcore eval`: accuracy of a run's newest checkpoint, or of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcore import CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine

RLCORE_API = 1


def run(line: CommandLine) -> int:
    """Evaluate the run, checkpoint or model folder given as the first word."""
    if not line.overrides or "=" in line.overrides[0]:
        raise ConfigError("the first word must be a run or model folder: rlcore eval RUN_OR_MODEL [OVERRIDE ...]")
    target, *overrides = line.overrides
    from rlcore.training.checkpoint import split_target
    from rlcore.training.folder import require_plugins
    from rlcore.training.preflight import preflight

    require_plugins(split_target(Path(target))[0], line.plugins)
    config = line.compose(overrides, base={**(line.saved() or {}), **target_values(target)})
    preflight(config, line.plugins, "evaluate")
    from rlcore.training.evaluate import evaluate

    evaluate(Path(target), config, line.plugins)
    return 0


def target_values(target: str) -> dict[str, Any]:
    """Return the saved config of a run folder or of a checkpoint's run, or for a model a config with that model."""
    from rlcore.config.files import read_values
    from rlcore.hub import split_name
    from rlcore.training.checkpoint import split_target

    folder, _ = split_target(Path(target))
    if (folder / "config.yaml").is_file():
        return read_values(folder / "config.yaml")
    if (folder / "config.json").is_file() or target == "tiny" or split_name(target) is not None:
        return {"model": {"path": target}}
    if folder.is_dir():
        raise ConfigError(f"{target!r} holds neither config.yaml (a run) nor config.json (a Hugging Face model)")
    raise ConfigError(
        f"{target!r} does not exist: it must be a folder with config.yaml (a run) or config.json (a Hugging Face "
        "model), or the name of a model on the hub, ORG/NAME"
    )


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore eval`."""
    return CommandSpec("eval", SUMMARIES["eval"], run=run, usage="RUN_OR_MODEL")
