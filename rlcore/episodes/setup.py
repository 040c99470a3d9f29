"""The setup of a run's episodes, which is made in the driver and sent to each process that samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.config import ModelConfig
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools, load_tokenizer
from rlcore.data.template_kwargs import COLUMN, row_template_kwargs
from rlcore.end_tokens import end_tokens
from rlcore.engine.rollout import EpisodeSource, RolloutEngine
from rlcore.episodes.processes import EnvironmentPool, PackedEnvironment
from rlcore.episodes.rendering import TurnRenderer
from rlcore.episodes.tool_calls import ToolFormat
from rlcore.errors import ConfigError, DataError
from rlcore.protocol import DataProto


@dataclass(frozen=True)
class EpisodeSetup:
    """The environment of a run, the tools that it offers, and how the model's turns are read.

    `tools`: OpenAI function JSON. `resets`, `steps`: the environment's class has the method of that name.
    `in_lockstep`: all turns that decode together end before the next ones begin, so that the environment's speed
    changes no bit of a log-prob. `play` makes the source of episodes for an engine. `environment` is None where that
    needs none. `prompt_len`: most tokens of a prompt. `folder`: in which agents run.
    `needs_score`: an episode without a score has failed, as the score is its reward. `key` is equal for equal setups.
    """

    env: EnvConfig
    model: ModelConfig
    environment: PackedEnvironment | None
    tools: tuple[dict[str, Any], ...]
    tool_format: ToolFormat
    offered: OfferedTools
    play: Callable[[EpisodeSetup, RolloutEngine], EpisodeSource]
    resets: bool = True
    steps: bool = True
    in_lockstep: bool = False
    needs_score: bool = False
    system_prompt: str | None = None
    prompt_len: int = 512
    folder: str = ""
    key: str = ""

    @property
    def max_failures(self) -> float:
        """Largest share of a batch's episodes that may fail."""
        return self.env.max_failures

    def open(self, engine: RolloutEngine) -> EpisodeSource:
        """Return the source that plays episodes with this engine."""
        return self.play(self, engine)

    def renderer(self) -> TurnRenderer:
        """Return the renderer of the conversation's turns."""
        tokenizer = load_tokenizer(self.model)
        return TurnRenderer(
            tokenizer,
            tools=[dict(each) for each in self.offered.schemas],
            template=self.env.template,
            end_ids=end_tokens(self.model, tokenizer),
        )

    def row_check(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that checks the chat template, as `check`, with the arguments of a data row.

        It raises DataError.
        """
        renderer, checked = self.renderer(), set[TurnRenderer]()

        def check(row: Mapping[str, Any]) -> None:
            given = row_template_kwargs(row)
            own = renderer.with_kwargs(given)
            if own is renderer or own in checked:
                return
            try:
                own.check()
            except ConfigError as error:
                raise DataError(f"with {COLUMN}={given}: {error}") from error
            checked.add(own)

        return check

    def check_batch(self, prompts: DataProto) -> None:
        """Check the chat template with the arguments of each row of a batch. Raises DataError."""
        check = self.row_check()
        for given in prompts.non_tensor_batch.get(COLUMN, ()):
            check({COLUMN: given})

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
