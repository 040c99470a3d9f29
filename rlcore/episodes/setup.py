"""The setup of a run's episodes: made and checked once in the driver, and sent to each process that samples."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcore.config import Config, ModelConfig
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools, PromptEncoder, load_tokenizer
from rlcore.engine.rollout import EpisodeSource, RolloutEngine
from rlcore.episodes.processes import EnvironmentPool, PackedEnvironment, pack
from rlcore.episodes.rendering import TurnRenderer
from rlcore.episodes.tool_calls import FORMATS, ToolFormat, format_for
from rlcore.episodes.tool_schema import schemas_of
from rlcore.engine.responses import end_tokens
from rlcore.errors import ConfigError
from rlcore.model_folder import model_path
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


@dataclass(frozen=True)
class EpisodeSetup:
    """The environment of a run, the tools that it offers, and how the model's turns are read.

    `tools`: OpenAI function JSON. `resets`: the environment's class has a method `reset`. `is_single_turn`: it has
    neither that nor tools nor a method `step`. `prompt_len`: most tokens of a prompt. `folder`: that of the command, in
    which agents start. `play`: that of an EnvironmentSpec which plays episodes itself; `environment` is then None. `key` is equal for equal setups.
    """

    env: EnvConfig
    model: ModelConfig
    environment: PackedEnvironment | None
    tools: tuple[Mapping[str, Any], ...]
    tool_format: ToolFormat
    offered: OfferedTools
    resets: bool = True
    is_single_turn: bool = False
    system_prompt: str | None = None
    prompt_len: int = 512
    folder: str = ""
    play: Callable[[EpisodeSetup, RolloutEngine], EpisodeSource] | None = None
    key: str = field(default="", compare=False)

    @property
    def max_failures(self) -> float:
        """Largest share of a batch's episodes that may fail."""
        return self.env.max_failures

    def open(self, engine: RolloutEngine) -> EpisodeSource:
        """Return the source that plays episodes with this engine."""
        from rlcore.episodes.environments import EnvironmentEpisodes

        return EnvironmentEpisodes(self, engine) if self.play is None else self.play(self, engine)

    def renderer(self) -> TurnRenderer:
        """Return the renderer of the conversation's turns."""
        tokenizer = load_tokenizer(self.model)
        return TurnRenderer(
            tokenizer,
            tools=[dict(each) for each in self.offered.schemas],
            template=self.env.template,
            end_ids=end_tokens(_generation_config(self.model), tokenizer),
        )

    def pool(self, processes: int) -> EnvironmentPool:
        """Return a pool of this many environment processes, not started."""
        assert self.environment is not None
        env = self.env
        return EnvironmentPool(
            self.environment,
            processes=processes,
            timeout=env.timeout,
            memory_mb=env.memory_mb,
            keep_env=tuple(env.keep_env),
        )

    def check(self) -> None:
        """Check the chat template, and load the environment in a process once.

        Raises ConfigError for a template that does not continue its own renderings, and for an environment that cannot
        be loaded.
        """
        self.renderer().check()
        if self.environment is not None:
            pool = self.pool(1)
            try:
                pool.start()
            finally:
                pool.close()


def episode_setup(config: Config, plugins: PluginManager) -> EpisodeSetup | None:
    """Return the setup of the run's environment; None for a run without one. Raises ConfigError for a broken one."""
    name = environment_of(config)
    if not name:
        return None
    spec = plugins.specs(EnvironmentSpec)[name]
    own = None if spec.config_class is None else config.section(spec.config_class)
    env = config.section(EnvConfig)
    if spec.play is not None:
        target, packed, tools = None, None, ()
    else:
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
            is_single_turn=not (tools or hasattr(target, "reset") or hasattr(target, "step") or spec.play),
            system_prompt=config.data.system_prompt,
            prompt_len=config.data.prompt_len,
            folder=os.getcwd(),
            play=spec.play,
        )
    )


def setup_without_environment(config: Config, plugins: PluginManager) -> EpisodeSetup:
    """Return a setup for conversations that no environment plays, as those of `rlcore serve`."""
    return EpisodeSetup(
        env=config.section(EnvConfig),
        model=config.model,
        environment=None,
        tools=(),
        tool_format=_tool_format(config, plugins),
        offered=OfferedTools(),
        prompt_len=config.data.prompt_len,
    )


def _with_key(setup: EpisodeSetup) -> EpisodeSetup:
    object.__setattr__(setup, "key", hashlib.sha256(pickle.dumps(vars(setup) | {"play": None})).hexdigest())
    return setup


def _tool_format(config: Config, plugins: PluginManager) -> ToolFormat:
    name = config.section(EnvConfig).tool_format
    if name != "auto":
        return plugins.specs(ToolFormatSpec)[name].format
    return FORMATS[format_for(load_tokenizer(config.model))]


def _generation_config(model: ModelConfig) -> Any:
    """Return the folder's generation config, None without one."""
    from transformers import GenerationConfig

    folder = model_path(model.path)
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None


def _offered(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat, config: Config) -> OfferedTools:
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


def check_environment(config: Config, plugins: PluginManager) -> None:
    """Raise ConfigError for settings of episodes that cannot work together."""
    name = environment_of(config)
    if not name:
        return
    if config.rollout.tp > 1:
        raise ConfigError(
            f"env={name} with rollout.tp={config.rollout.tp}: the ranks that share a row would have to see each answer "
            "of the environment at the same time; set rollout.tp=1, or leave out env"
        )
    env = config.section(EnvConfig)
    if env.turn_len > config.rollout.response_len:
        raise ConfigError(
            f"env.turn_len={env.turn_len} is more than rollout.response_len={config.rollout.response_len}, the limit of "
            "a whole episode"
        )
    check = plugins.specs(EnvironmentSpec)[name].check
    if check is not None:
        check(config)
