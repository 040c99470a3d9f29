"""The evaluations of `eval.sets` and the sources of `data.mix`: rewards and prompts, with the checks of both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.config import Config, EvalSetConfig
from rlcore.config.eval_sets import naming, set_config, source_config
from rlcore.data.chat import check_tokens
from rlcore.data.loader import PromptLoader, PromptSplit, check_rendered
from rlcore.data.mix import MixLoader
from rlcore.end_tokens import find_end_tokens
from rlcore.episodes.from_config import default_reward
from rlcore.episodes.setup import EpisodeSetup
from rlcore.errors import ConfigError
from rlcore.model_folder import check_positions
from rlcore.plugins import DatasetSpec, PluginManager, Role
from rlcore.protocol import DataProto
from rlcore.rewards.compose import WeightedReward, needing_answer, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalSet:
    """An evaluation of `eval.sets`, or a source of `data.mix`, on whose held-out prompts a run is evaluated too.

    path: its config key. given: its own keys. config: the run's config with them (`set_config`, `source_config`).
    rewards: its reward functions; the run's own list where the same functions score both, under the same limits.
    row_tokens: most tokens of a prompt and its response for which the engines start.
    """

    name: str
    path: str
    given: EvalSetConfig
    config: Config
    dataset: DatasetSpec
    rewards: list[WeightedReward]
    row_tokens: int

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of its `generate` call."""
        # Without a length of its own it has the actor's, which `roles.actor.rollout` may change.
        length = {} if self.given.response_len is None else {"max_tokens": self.given.response_len}
        return {"temperature": self.config.trainer.eval_temperature, **length}


def eval_sets(
    config: Config,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    dataset: DatasetSpec,
    rewards: list[WeightedReward],
) -> list[EvalSet]:
    """Return the evaluations of `eval.sets`, with their reward functions resolved.

    roles: the run's; the actor samples. dataset, rewards: the run's own. Raises the errors of `resolve`, naming the
    evaluation.
    """
    row_tokens = _row_tokens(config, roles)
    default = default_reward(config, plugins, dataset)
    sets = []
    for name, given in config.eval.sets.items():
        path = f"eval.sets.{name}"
        with naming(path):
            own = set_config(config, name)
            spec, own_rewards = _data_and_rewards(own, config, plugins, default, rewards)
        sets.append(EvalSet(name, path, given, own, spec, own_rewards, row_tokens))
    return sets


def mix_sources(
    config: Config,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    dataset: DatasetSpec,
    rewards: list[WeightedReward],
) -> list[EvalSet]:
    """Return the sources of `data.mix`, as `eval_sets` returns the evaluations."""
    row_tokens = _row_tokens(config, roles)
    default = default_reward(config, plugins, dataset)
    sources = []
    for name in config.data.mix:
        path = f"data.mix.{name}"
        with naming(path):
            own = source_config(config, name)
            spec, own_rewards = _data_and_rewards(own, config, plugins, default, rewards)
        sources.append(EvalSet(name, path, EvalSetConfig(), own, spec, own_rewards, row_tokens))
    return sources


def mix_loader(
    config: Config, sources: Sequence[EvalSet], tokenizer: PreTrainedTokenizerBase, episodes: EpisodeSetup | None
) -> MixLoader:
    """Return the loader of `data.mix`. Raises the errors of PromptLoader, naming the source."""
    tools = None if episodes is None else episodes.offered
    loaders = {}
    for source in sources:
        with naming(source.path):
            loaders[source.name] = PromptLoader(
                source.config.data, source.dataset, tokenizer, seed=config.trainer.seed, tools=tools
            )
    return MixLoader(config.data, loaders)


def _row_tokens(config: Config, roles: Mapping[str, Role]) -> int:
    """Return the most tokens of a prompt and its response for which the engines start."""
    settings = roles["actor"].rollout if "actor" in roles else {}
    return config.data.prompt_len + int(settings.get("response_len", config.rollout.response_len))


def _data_and_rewards(
    own: Config, config: Config, plugins: PluginManager, default: str, rewards: list[WeightedReward]
) -> tuple[DatasetSpec, list[WeightedReward]]:
    """Return the data set of an evaluation or source with the config `own`, and its reward functions.

    default, rewards: the reward of a run that chooses none, and the run's own functions.
    """
    dataset = plugins.datasets()[own.data.name].bound(own)
    own_default = default_reward(own, plugins, dataset)
    if _rewards_key(own, own_default) == _rewards_key(config, default):
        return dataset, rewards
    key = own.data.answer_key
    return dataset, resolve(own.reward, own_default, plugins.rewards(), plugins.by_value_modules, key)


def _rewards_key(config: Config, default: str) -> tuple[Any, ...]:
    """Return everything that a run's reward workers depend on; default: the reward of a config that chooses none."""
    is_chosen = config.reward.functions or config.reward.path is not None
    return config.reward, config.data.answer_key, None if is_chosen else default


def load_prompts(each: EvalSet, tokenizer: PreTrainedTokenizerBase, episodes: EpisodeSetup | None) -> DataProto:
    """Return the prompts of an evaluation, uid `eval/NAME:ROW`.

    Raises DataError and ConfigError, naming the evaluation, for faults of its data and for rows that do not fit.
    """
    config = each.config
    with naming(each.path):
        tools = None if episodes is None else episodes.offered
        split = PromptSplit(config.data, each.dataset, tokenizer, "eval", tools)
        if "rendered" in each.given.data:  # the run's own names may be columns of its other data sets
            check_rendered(config.data, [*split.columns, *split.keys, "answer"])
        if split.overlong and config.data.overlong == "filter":
            log.warning(
                "%s leaves out %d of %d prompts, which have more than %d tokens; raise %s.data.prompt_len",
                *(each.path, split.overlong, len(split.rows), config.data.prompt_len, each.path),
            )
        prompts = checked_prompts(config, split, f"eval/{each.name}", tokenizer, episodes, each.rewards)
        longest, response = int(prompts["prompts"].lengths.max()), config.rollout.response_len
        if longest + response > each.row_tokens:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and a response up to rollout.response_len={response}, which "
                f"is {longest + response}, but the engines start for rows of {each.row_tokens}, the sum of prompt_len "
                f"and response_len of the run. Lower rollout.response_len to {max(each.row_tokens - longest, 0)}, or "
                "raise prompt_len of the run"
            )
        return prompts


def checked_prompts(
    config: Config,
    split: PromptSplit,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    episodes: EpisodeSetup | None,
    rewards: Sequence[WeightedReward],
) -> DataProto:
    """Return the first `data.eval_size` prompts of a split (0: all), uid `NAME:ROW`, after all checks of them.

    rewards: the functions that will score them. Raises DataError and ConfigError.
    """
    if needing := needing_answer(rewards):
        split.require_answers(needing)
    for reward in rewards:
        split.require_columns(reward.name, reward.needs_columns)
    prompts = split.batch(split.usable[: config.data.eval_size or None], name)
    check_positions(config, int(prompts["prompts"].lengths.max()))
    size = find_end_tokens(config.model, tokenizer).vocab_size
    check_tokens(size, tokenizer, [int(prompts["prompts"].values.max())], "prompts")
    if episodes is not None:
        episodes.check()
        episodes.check_batch(prompts)
    return prompts


PromptsBySet = Sequence[tuple[EvalSet, DataProto]]
"""The named evaluations with their prompts, in the order of the config."""
