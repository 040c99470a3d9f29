"""`rlcore serve`: an OpenAI-compatible server over a run's newest checkpoint, or over a model folder."""

from __future__ import annotations

import ipaddress
import os
import signal
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import CommandSpec, Config, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.eval import target_values
from rlcore.commands.line import CommandLine

if TYPE_CHECKING:
    from rlcore.episodes.server import ServerOptions
    from rlcore.plugins import PluginManager

RLCORE_API = 1
KEY = "RLCORE_SERVE_KEY"


def run(line: CommandLine) -> int:
    """Serve the run or model folder given as the first word until Ctrl-C or SIGTERM."""
    if not line.overrides or "=" in line.overrides[0]:
        raise ConfigError("the first word must be a run or model folder: rlcore serve RUN_OR_MODEL [OVERRIDE ...]")
    target, *overrides = line.overrides
    from rlcore.episodes.builtin import require_server

    require_server("rlcore serve")
    options = _options(line, target)
    from rlcore.folder import require_plugins
    from rlcore.preflight import preflight

    require_plugins(Path(target), line.plugins)
    # The server's thread and the engine share one process, whatever the run had.
    config = line.compose(["cluster=in_process", *overrides], base={**(line.saved() or {}), **target_values(target)})
    if config.cluster.executor != "in_process":
        raise ConfigError(f"cluster.executor={config.cluster.executor}: rlcore serve runs in one process, in_process")
    config = _plain_actor(config, Path(target))
    preflight(config, line.plugins, "evaluate")
    _serve(config, line.plugins, options, Path(target), line.options.session_tokens)
    return 0


def _options(line: CommandLine, target: str) -> ServerOptions:
    """Return the options of the server; ConfigError for another address than this machine's own without a key."""
    from rlcore.episodes.server import ServerOptions

    given = line.options
    key = given.key or os.environ.get(KEY, "")
    if not key and not _is_loopback(given.host):
        raise ConfigError(f"--host {given.host} can be reached from other machines: give --key KEY, or set {KEY}")
    for name, least in (("max_sessions", 1), ("idle_seconds", 0.1), ("max_body_mb", 0.001), ("session_tokens", 1)):
        if getattr(given, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(given, name)} is less than {least}")
    return ServerOptions(
        model=Path(target).name or target,
        host=given.host,
        port=given.port,
        key=key,
        body_bytes=int(given.max_body_mb * 2**20),
        most_sessions=given.max_sessions,
        idle_seconds=given.idle_seconds,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _plain_actor(config: Config, target: Path) -> Config:
    """Return the config without an algorithm or an environment, with the weights of the run's newest checkpoint."""
    from rlcore.checkpoint import checkpoints
    from rlcore.config.environment import EnvConfig
    from rlcore.errors import CheckpointError
    from rlcore.folder import CONFIG

    model = config.model
    if (target / CONFIG).is_file():
        found = checkpoints(target / "checkpoints")
        if not found:
            raise CheckpointError(f"the run {target} has no checkpoint to serve; train longer, or give a model folder")
        model = replace(model, path=str((found[-1] / "actor" / "model").resolve()))
    env: Any = replace(config.section(EnvConfig), name="", path=None, command=None)
    return replace(config, algorithm="", model=model, sections={**config.sections, "env": env})


def _serve(config: Config, plugins: PluginManager, options: ServerOptions, target: Path, session_tokens: int) -> None:
    from rlcore.episodes.from_config import server_setup
    from rlcore.episodes.standalone import Standalone
    from rlcore.protocol import DataProto, Ragged
    from rlcore.roles.placement import Placement, plan_pools, restrict_to_roles
    from rlcore.roles.settings import evaluated_roles, with_settings
    from rlcore.run import open_run

    declared = evaluated_roles(None)
    config = restrict_to_roles(config, declared)
    roles = {name: replace(role, model=None) for name, role in with_settings(declared, config).items()}
    placement = Placement(plan_pools(config, roles, plugins.train_engines()))

    def ready(url: str) -> None:
        CommandLine.show(f"serving {options.model} at {url}/v1; sessions: POST {url}/sessions; Ctrl-C ends it")

    import torch

    episodes = server_setup(config, plugins, Standalone(options, ready, session_tokens))
    nothing = DataProto.from_dict(
        {"prompts": Ragged.from_list([], dtype=torch.int64), "sample_index": torch.zeros(0, dtype=torch.int64)},
        {"uid": []},
    )
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with open_run(config, target.resolve(), plugins, roles, [], placement=placement) as started:
            started.actor.rollout(nothing, episodes)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def add_options(parser: ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one")
    parser.add_argument("--key", default="", help=f"key that clients must send (default: the variable {KEY})")
    parser.add_argument("--max-sessions", type=int, default=1024, help="most sessions at a time")
    parser.add_argument("--idle-seconds", type=float, default=3600.0, help="a session without calls ends after these")
    parser.add_argument("--max-body-mb", type=float, default=8.0, help="longest request body, in MiB")
    parser.add_argument("--session-tokens", type=int, default=2**20, help="most tokens that a session keeps")


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore serve`."""
    return CommandSpec("serve", SUMMARIES["serve"], run=run, options=add_options, usage="RUN_OR_MODEL")
