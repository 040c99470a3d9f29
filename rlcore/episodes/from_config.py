"""The setup of episodes that a run's config names, and the checks of its settings."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools, PromptEncoder, load_tokenizer
from rlcore.end_tokens import end_tokens
from rlcore.engine.rollout import EpisodeSource, RolloutEngine
from rlcore.episodes.environments import EnvironmentEpisodes
from rlcore.episodes.processes import pack
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.template_format import format_for
from rlcore.episodes.tool_calls import ToolFormat
from rlcore.episodes.tool_schema import schemas_of
from rlcore.errors import ConfigError
from rlcore.plugins.specs import (
    ENVIRONMENT_REWARD,
    DatasetSpec,
    EnvironmentSpec,
    ToolFormatSpec,
    environment_of,
    has_scores,
)

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


def episode_setup(config: Config, plugins: PluginManager) -> EpisodeSetup | None:
    """Return the setup of the run's environment; None for a run without one. Raises ConfigError for a broken one."""
    name = environment_of(config)
    if not name:
        return None
    spec = plugins.specs(EnvironmentSpec)[name]
    own = None if spec.config_class is None else config.section(spec.config_class)
    env = config.section(EnvConfig)
    target, packed = None, None
    tools: tuple[dict[str, Any], ...] = ()
    if spec.play is None:
        target = spec.environment if spec.load is None else spec.load(config)
        packed = pack(name, target, own, imports=spec.imports, by_value=plugins.by_value_modules)
        tools = tuple(schemas_of(target))
    tool_format = _tool_format(config, plugins)
    return _with_key(
        EpisodeSetup(
            env=env,
            model=config.model,
            environment=packed,
            tools=tools,
            tool_format=tool_format,
            offered=_offered(tools, tool_format, config),
            resets=hasattr(target, "reset"),
            steps=hasattr(target, "step"),
            in_lockstep=config.trainer.deterministic,
            needs_score=_rewards_scores(config, plugins),
            system_prompt=config.data.system_prompt,
            prompt_len=config.data.prompt_len,
            folder=os.getcwd(),
            play=spec.play or EnvironmentEpisodes,
        )
    )


def server_setup(
    config: Config, plugins: PluginManager, play: Callable[[EpisodeSetup, RolloutEngine], EpisodeSource]
) -> EpisodeSetup:
    """Return a setup without an environment, for `rlcore serve`."""
    tool_format = _tool_format(config, plugins)
    env, model = config.section(EnvConfig), config.model
    return EpisodeSetup(env, model, None, (), tool_format, OfferedTools(), play, prompt_len=config.data.prompt_len)


def _with_key(setup: EpisodeSetup) -> EpisodeSetup:
    values = {name: value for name, value in vars(setup).items() if name != "play"}
    return replace(setup, key=hashlib.sha256(pickle.dumps(values)).hexdigest())


def _tool_format(config: Config, plugins: PluginManager) -> ToolFormat:
    name = config.section(EnvConfig).tool_format
    if name != "auto":
        return plugins.specs(ToolFormatSpec)[name].format
    tokenizer = load_tokenizer(config.model)
    return format_for(tokenizer, [str(tokenizer.decode([each])) for each in end_tokens(config.model, tokenizer)])


def _offered(tools: Sequence[dict[str, Any]], tool_format: ToolFormat, config: Config) -> OfferedTools:
    """Return the tools for the prompts: by the chat template if it shows them, else as instructions."""
    if not tools or config.section(EnvConfig).tools == "off":
        return OfferedTools()
    tokenizer = load_tokenizer(config.model)
    by_template = OfferedTools(tools)
    shown = PromptEncoder(tokenizer, tools=by_template).render("Hello")
    if shown != PromptEncoder(tokenizer).render("Hello"):
        return by_template
    return OfferedTools(instructions=tool_format.instructions(tools))


def default_reward(config: Config, plugins: PluginManager, dataset: DatasetSpec) -> str:
    """Return the name of the reward of a run that chooses none: the environment's if it scores, else the data set's."""
    return ENVIRONMENT_REWARD if has_scores(config, plugins) else dataset.reward


def _rewards_scores(config: Config, plugins: PluginManager) -> bool:
    """Whether the environment's score is the reward, or part of it."""
    chosen = config.reward.functions
    return config.reward.path is None and (ENVIRONMENT_REWARD in chosen if chosen else has_scores(config, plugins))


def check_environment(config: Config, plugins: PluginManager) -> None:
    """Raise ConfigError for settings of episodes that cannot work together."""
    name = environment_of(config)
    if not name:
        _check_unused(config)
        return
    env = config.section(EnvConfig)
    if env.path is not None and name != "file":
        raise ConfigError(f"env.path={env.path} is read by env=file only, not by env={name}")
    if env.mcp is not None and name != "mcp":
        raise ConfigError(f"env.mcp={env.mcp!r} is read by env=mcp only, not by env={name}")
    if config.rollout.tp > 1:
        raise ConfigError(
            f"env={name} with rollout.tp={config.rollout.tp}: the ranks that share a row would have to see each answer "
            "of the environment at the same time; set rollout.tp=1, or leave out env"
        )
    if env.turn_len > config.rollout.response_len:
        raise ConfigError(
            f"env.turn_len={env.turn_len} is more than rollout.response_len={config.rollout.response_len}, the limit "
            "of a whole episode"
        )
    spec = plugins.specs(EnvironmentSpec)[name]
    if spec.check is not None:
        plugins.call(spec, "check", spec.check, config)


def _check_unused(config: Config) -> None:
    """Raise ConfigError for keys `env.*` of a run without an environment: they would do nothing."""
    env = config.sections.get("env", EnvConfig())
    for field in fields(EnvConfig):
        if (value := getattr(env, field.name)) != getattr(EnvConfig(), field.name):
            raise ConfigError(f"env.{field.name}={value} without an environment does nothing; choose one with env=NAME")


def environment_files(config: Config) -> list[tuple[Path, str]]:
    """Return path and sha256 (hex) of the file named by `env.path`, if there is one."""
    env = config.sections.get("env", EnvConfig())
    if env.path is None:
        return []
    file = Path(env.path.rpartition(":")[0]).expanduser()
    return [(file, hashlib.sha256(file.read_bytes()).hexdigest())]
