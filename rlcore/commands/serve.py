"""`rlcore serve`: an OpenAI-compatible server over a run's newest checkpoint, or over a model folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import CommandSpec, Config, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.eval import target_values
from rlcore.commands.line import CommandLine
from rlcore.episodes.serve_options import add_options, server_options

if TYPE_CHECKING:
    from rlcore.episodes.server import ServerOptions
    from rlcore.plugins import PluginManager

RLCORE_API = 1


def run(line: CommandLine) -> int:
    """Serve the run or model folder given as the first word until Ctrl-C or SIGTERM."""
    if not line.overrides or "=" in line.overrides[0]:
        raise ConfigError("the first word must be a run or model folder: rlcore serve RUN_OR_MODEL [OVERRIDE ...]")
    target, *overrides = line.overrides
    options = server_options(line.options, target)
    from rlcore.config.environment import EnvConfig
    from rlcore.training.checkpoint import split_target
    from rlcore.training.folder import require_plugins
    from rlcore.training.preflight import preflight

    require_plugins(split_target(Path(target))[0], line.plugins)
    # The server's thread and the engine share one process, whatever the run had.
    base = {**(line.saved() or {}), **target_values(target)}
    config = line.compose(["cluster=in_process", *overrides], base=base)
    if config.cluster.executor != "in_process":
        raise ConfigError(f"cluster.executor={config.cluster.executor}: rlcore serve runs in one process, in_process")
    config = replace(with_weights(config, Path(target)), algorithm="")
    # The environment of a run plays nothing here; only its keys of the model's turns count.
    preflight(replace(config, sections={**config.sections, "env": EnvConfig()}), line.plugins, "evaluate")
    _serve(config, line.plugins, options, Path(target))
    return 0


def with_weights(config: Config, target: Path) -> Config:
    """Return the config with the model to sample from: a folder's own, a checkpoint's, or that of a run's newest."""
    from rlcore.errors import CheckpointError
    from rlcore.model_folder import with_saved_actor
    from rlcore.training.checkpoint import chosen_whole, split_target
    from rlcore.training.folder import CONFIG

    if not (split_target(target)[0] / CONFIG).is_file():
        return config
    if found := chosen_whole(target, "actor/model"):
        return with_saved_actor(config, found / "actor" / "model")
    raise CheckpointError(f"the run {target} has no checkpoint to sample from; train longer, or give a model folder")


def _serve(config: Config, plugins: PluginManager, options: ServerOptions, target: Path) -> None:
    from rlcore.episodes.from_config import server_setup
    from rlcore.episodes.standalone import Standalone, no_prompts
    from rlcore.exits import work_begins
    from rlcore.training.evaluate import open_actor

    setup: Any = server_setup(config, plugins, Standalone(options, CommandLine.show))
    with open_actor(config, target.resolve(), plugins) as started:
        work_begins()
        started.actor.rollout(no_prompts(), setup)


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore serve`."""
    return CommandSpec("serve", SUMMARIES["serve"], run=run, options=add_options, usage="RUN_OR_MODEL")
