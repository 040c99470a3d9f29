"""Run: an algorithm's interface to its models, rewards, data and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from rlcore.config import Config, RewardConfig
from rlcore.data.chat import ResponseEncoder, load_tokenizer
from rlcore.data.loader import PromptLoader
from rlcore.data.mix import SOURCE, MixLoader
from rlcore.end_tokens import find_end_tokens
from rlcore.episodes.setup import EpisodeSetup
from rlcore.errors import DataError, NoRoleError, did_you_mean
from rlcore.hub import is_pinned
from rlcore.model_folder import model_path
from rlcore.plugins import Role
from rlcore.protocol import DataProto
from rlcore.protocol.balance import split_batch_by_group
from rlcore.rewards.compose import WeightedReward
from rlcore.rewards.failures import one_score_each, with_reward
from rlcore.rewards.worker import RewardWorker, extracts_answers, failure_details, named_scores
from rlcore.roles import checks
from rlcore.roles.handles import HANDLES, CriticHandle, PolicyHandle, RewardHandle, RoleHandle, StepClock
from rlcore.roles.placement import Placement
from rlcore.roles.plugin_groups import PluginGroups, group_requests
from rlcore.roles.pools import REWARD_WORKERS, ROLLOUT
from rlcore.roles.settings import REWARD_MODEL
from rlcore.roles.start import RoleStart, start_roles
from rlcore.training.eval_sets import EvalSet
from rlcore.workers import ClassWithInitArgs, Executor, Future, WorkerGroup, make_executor, wait_for
from rlcore.workers.executor import ProcessRequest

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


H = TypeVar("H", bound=RoleHandle)
MODEL_FAILED = {"function": "reward.model", "cause": "gave a score that is not finite", "traceback": ""}
"""The failure of a row whose score by the reward model is NaN or infinite."""


class Run:
    """The models of a run as `run.ROLE`, its reward as `run.reward`, its config, folder and step.

    `config`: the whole typed config. `dir`: the run folder. `step`: from 1; 0 before the first. A type checker knows
    the kinds of the usual roles below; for other names, `run.role(NAME, CriticHandle)` states the kind.
    """

    actor: PolicyHandle
    ref: PolicyHandle
    critic: CriticHandle
    reward_model: RewardHandle

    def __init__(
        self,
        config: Config,
        folder: Path,
        clock: StepClock,
        roles: Mapping[str, RoleHandle],
        scorer: Scorer,
        plugin_groups: PluginGroups,
        loaders: Mapping[str, PromptLoader | MixLoader],
        scorers_of_sets: Mapping[str, Scorer],
    ) -> None:
        """`scorers_of_sets`: those of the evaluations and sources that have rewards of their own, by name."""
        self.config, self.dir = config, folder
        self.roles = dict(roles)
        self._loaders = loaders
        self._clock = clock
        self._scorer = scorer
        self._scorers_of_sets = scorers_of_sets
        self._plugin_groups = plugin_groups
        self._logged: dict[str, float] = {}
        self._scored: list[ScoredBatch] = []

    @property
    def step(self) -> int:
        """The step under way, from 1; 0 before the first."""
        return self._clock.step

    def __getattr__(self, name: str) -> RoleHandle:
        roles = self.__dict__.get("roles", {})
        if name not in roles:
            raise NoRoleError(
                f"this run has no role {name!r}.{did_you_mean(name, roles)} The algorithm's roles() declares "
                f"{', '.join(roles) or 'none'}; add the role there."
            )
        return roles[name]

    @property
    def has_updated(self) -> bool:
        """Whether a role was updated in the step under way. For the trainer."""
        return self._clock.updates > 0

    def role(self, name: str, handle_class: type[H]) -> H:
        """Return the handle of role `name`, which must be of this class: PolicyHandle, CriticHandle or RewardHandle.

        Raises NoRoleError for an unknown role, and for one of another kind.
        """
        handle = self.__getattr__(name)
        if not isinstance(handle, handle_class):
            raise NoRoleError(
                f"role {name!r} is a {handle.role.kind}, so its handle is not a {handle_class.__name__}; "
                f"ask for run.role({name!r}, {HANDLES[handle.kind].__name__}), or declare it with "
                f"Role(kind={handle_class.kind!r})"
            )
        return handle

    def group(self, name: str) -> Any:
        """Return a plugin's workers of this name: a WorkerGroup, or the plugin's own handle of it.

        They started with the roles. The end of a step waits for its running calls. Raises PluginError for a name that
        no installed plugin gives with this config.
        """
        return self._plugin_groups.get(name)

    def reward(self, batch: DataProto, *, record: bool = True, keep_failed: bool = False) -> DataProto:
        """Return each row's `scores` (fp32), `reward_error` and `reward_detail`; with several rewards `score/NAME` too.

        Scores by the reward functions, by the reward model of `reward.model`, or by both, weighted. Functions read
        `prompt_text`, `response_text`, `answer` and get all other object columns too; a reward model reads `prompts`
        and `responses`. The step's metrics also need the other columns of `generate`. `record=False` leaves the batch
        out of the metrics, for a batch that is not sampled from the policy (a greedy rollout as a baseline).

        Only rows that have a reward are returned, and the union with `batch` keeps these rows only. Left out are rows
        whose reward failed (`reward.error_value` gives them a score instead), and a row that is then left alone of its
        group, the rows of equal `uid`. All branches of an episode get the mean of their scores. It returns at once; the
        first use of the result waits for the rewards. That use raises RewardsError when more than the share
        `reward.max_failures` of the rows have no reward. With `keep_failed` all rows stay, with a score of NaN, and any
        number may fail: for an algorithm that learns from something else.
        """
        by_row = self._score_by_model(batch) if REWARD_MODEL in self.roles else self.score_by_functions(batch)
        scored = DataProto.deferred(lambda: one_score_each(batch, by_row)) if "episode" in batch else by_row
        most = self.config.reward.max_failures
        rewards = scored if keep_failed else DataProto.deferred(lambda: with_reward(batch, scored, most))
        if record:
            self._scored.append(ScoredBatch(batch, scored, rewards))
        return rewards

    def score_by_functions(
        self, batch: DataProto, *, extract: bool = False, evaluation: str | None = None
    ) -> DataProto:
        """Return the scores of all rows by the reward functions only, without a record in the step's metrics.

        The score of a row whose reward failed is `reward.error_value`, or NaN. Evaluations use it, as a reward model
        cannot tell whether an answer is right. With `extract` the result has the column `extracted_answer`, where a
        reward function can extract answers. `evaluation`: the name in `eval.sets` of the evaluation whose functions
        score.
        """
        mix = self._loaders.get("train")
        if evaluation is None and isinstance(mix, MixLoader) and SOURCE in batch:
            return self._score_mix(mix, batch, extract)
        scorer = self._scorer if evaluation is None else self._scorers_of_sets.get(evaluation, self._scorer)
        return scorer.score(batch, extract)

    def _score_mix(self, mix: MixLoader, batch: DataProto, extract: bool) -> DataProto:
        """Return the scores of all rows, each by the functions of its source; all calls are made before any result."""
        names = batch.view(SOURCE)
        rows = {name: np.flatnonzero(names == name) for name in dict.fromkeys(names)}
        scored = []
        for name, own in rows.items():
            scorer = self._scorers_of_sets.get(name, self._scorer)
            scored.append(scorer.score(mix.own_columns(batch[own], name), extract))
        order = np.argsort(np.concatenate([*rows.values()]))
        return DataProto.deferred(lambda: _join_scores(scored)[order])

    def _score_by_model(self, batch: DataProto) -> DataProto:
        settings = self.config.reward
        # Both calls are made before either result is read.
        by_model = self.role(REWARD_MODEL, RewardHandle).score(batch, keep_failed=True)
        by_functions = self.score_by_functions(batch) if settings.functions or settings.path is not None else None

        def scored() -> DataProto:
            of_model = by_model["scores"]
            failed = of_model.isnan()
            failures = [MODEL_FAILED if fails else None for fails in failed.tolist()]
            details = failure_details(failures, batch)
            weighted = settings.model_weight * of_model
            if by_functions is None:
                columns = {"scores": weighted, "reward_error": failed}
                both = DataProto.from_dict(columns, {"reward_detail": details})
            else:
                both = by_functions[:]
                details = [one or other for one, other in zip(both["reward_detail"], details, strict=True)]
                both["score/model"] = of_model
                both["scores"] = both.view("scores") + weighted
                both["reward_error"] = both.view("reward_error") | failed
                both["reward_detail"] = np.array(details, dtype=object)
            if settings.error_value is not None:
                both["scores"] = both.view("scores").masked_fill(both.view("reward_error"), settings.error_value)
            return both

        return DataProto.deferred(scored)

    def next_prompts(self, name: str = "train") -> DataProto:
        """Return the next prompts of a data set: the run's own ("train"), or one of the algorithm's `data`.

        Its position is part of the run's checkpoints. Raises DataError for an unknown name.
        """
        if name not in self._loaders:
            raise DataError(
                f"this run has no data set {name!r}, only {', '.join(self._loaders) or 'none'}."
                f"{did_you_mean(name, self._loaders)} An algorithm's data(config) can add data sets."
            )
        return self._loaders[name].next_batch()

    def encode(self, batch: DataProto, column: str) -> DataProto:
        """Return `responses` and `response_mask` of the texts in an object column, as if the policy had sampled them.

        Each ends with an end token of the model, and is cut after `rollout.response_len` tokens. Special tokens in a
        text are text, unless `data.rendered` names the column. Raises DataError naming a row without a text.
        """
        return self._encoder.encode(batch, column)

    def encode_pairs(self, batch: DataProto, first: str, second: str) -> tuple[DataProto, DataProto]:
        """Return the batch with the responses in column `first`, and with those in `second`, as `encode` gives them.

        Rows whose two responses are equal, perhaps only after the cut, hold no preference and are left out of both.
        """
        sides = [self.encode(batch, column) for column in (first, second)]
        rows = zip(*(side.view("responses").to_list() for side in sides), strict=True)
        differ = torch.tensor([not torch.equal(one, other) for one, other in rows], dtype=torch.bool)
        one, other = (batch.union(side)[differ] for side in sides)
        return one, other

    @cached_property
    def _encoder(self) -> ResponseEncoder:
        config, tokenizer = self.config, load_tokenizer(self.config.model)
        ends = find_end_tokens(config.model, tokenizer)
        return ResponseEncoder(tokenizer, config.rollout.response_len, ends, config.data.rendered)

    def log(self, metrics: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Add numbers to the step's metrics: `log({"dpo/pairs": 3})`, or `log(pairs=3)` for a plain name.

        Raises DataError for a value that is not a number.
        """
        for name, value in {**(metrics or {}), **named}.items():
            if not isinstance(value, Real):
                raise DataError(f"run.log: {name}={value!r} is a {type(value).__name__}, not a number")
            self._logged[name] = float(value)

    def begin_step(self, step: int) -> None:
        """Move to a step. For the trainer, not for algorithms."""
        self._clock.start(step)

    def close_step(self) -> EndedStep:
        """Return the step's logged numbers, scored batches and running calls, without waiting. For the trainer."""
        for role in self.roles.values():
            role.end_step(self.step)
            self._logged |= role.step_metrics()
        outstanding = [future for group in self._groups() for future in group.outstanding()]
        logged, scored = self._logged, self._scored
        self._logged, self._scored = {}, []
        return EndedStep(logged, scored, outstanding, self._plugin_groups.end_step())

    def end_step(self) -> tuple[dict[str, float], list[DataProto]]:
        """Wait for all calls; return the logged numbers and all scored batches. For the trainer."""
        return self.close_step().wait()

    def spans(self) -> list[Future]:
        """Request all processes' spans since the last request. For the trainer."""
        # By id: the groups of fused roles share their processes, which have one list of spans.
        processes = {id(group.processes): group.processes for group in self._groups()}
        return [each.spans() for each in processes.values()]

    def _groups(self) -> list[WorkerGroup]:
        of_roles = [group for role in self.roles.values() for group in role.groups]
        scorers = [self._scorer, *self._scorers_of_sets.values()]
        return [*of_roles, *(scorer.workers for scorer in scorers), *self._plugin_groups.groups.values()]


def _join_scores(scored: Sequence[DataProto]) -> DataProto:
    """Return the rows of all batches; a reward function's column is NaN in rows that another source's score."""
    columns = {name: None for batch in scored for name in batch.keys()}  # noqa: SIM118 (a batch is not a dict)
    filled = [batch[:] for batch in scored]
    for batch in filled:
        for name in columns:
            if name not in batch:
                is_score = name.startswith("score/")
                batch[name] = torch.full((len(batch),), math.nan) if is_score else [None] * len(batch)
    return DataProto.concat(filled)


@dataclass(frozen=True)
class Scorer:
    """Reward functions, and the workers that call them under the limits of `config`."""

    workers: WorkerGroup
    functions: Sequence[WeightedReward]
    config: RewardConfig

    def score(self, batch: DataProto, extract: bool) -> DataProto:
        """See `Run.score_by_functions`."""
        extracts = extract and extracts_answers(self.functions)
        named = named_scores(self.functions, self.config)
        columns = list(batch.non_tensor_batch.keys())
        tensors = ["sample_index"] if "sample_index" in batch else []
        tensors += ["responses"] if self.config.special_tokens else []
        sent, workers = batch.select(tensors, columns, []), self.workers.world_size
        # A batched function may compare the rows of a prompt, so they stay together.
        if workers == 1 or not any(function.batched for function in self.functions) or "uid" not in batch:
            return self.workers.score(sent, named, extracts)
        cut, back = split_batch_by_group(sent, list(batch.view("uid")), workers)
        return self.workers.score(cut, named, extracts)[back]


@dataclass(frozen=True)
class ScoredBatch:
    """A batch, the scores of all its rows, and `rewards`: those of the rows that have one."""

    batch: DataProto
    scored: DataProto
    rewards: DataProto

    def rows(self) -> DataProto:
        """Return all rows with their scores; raises RewardsError when too many have none."""
        len(self.rewards)  # raises it, should the algorithm not have read them
        return self.batch.union(self.scored)


@dataclass
class EndedStep:
    """The results of a step after its last call; some calls may still be running."""

    logged: dict[str, float]
    scored: list[ScoredBatch]
    outstanding: list[Future]
    metrics: Sequence[Callable[[], Mapping[str, float]]]

    def wait(self) -> tuple[dict[str, float], list[DataProto]]:
        """Wait for all calls; return the logged numbers and all scored batches. Raises the first error."""
        wait_for(self.outstanding)
        logged = dict(self.logged)
        for metrics in self.metrics:
            logged |= metrics()
        return logged, [each.rows() for each in self.scored]


@contextmanager
def open_run(
    config: Config,
    folder: Path,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    rewards: list[WeightedReward],
    *,
    placement: Placement | None = None,
    episodes: EpisodeSetup | None = None,
    sets: Sequence[EvalSet] = (),
    loaders: Mapping[str, PromptLoader | MixLoader] | None = None,
    log_dir: Path | None = None,
    executor: Executor | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[Run]:
    """Start the workers of all roles and of the rewards on the run's pools; stop them at the end.

    roles: from `resolve_roles`, checked by `check_roles`.
    placement: the run's pools; None: plans them here, and raises ConfigError for impossible pools.
    episodes: the setup of the run's environment, from `episode_setup`.
    sets: the sources of `data.mix` and the evaluations of `eval.sets`; their rewards run in the processes of the run's.
    loaders: the data sets of `run.next_prompts`, by name.
    log_dir: folder in which each worker writes its own log file.
    executor: starts the workers; None: the executor of `cluster.executor`.
    meanwhile: called while the worker processes start, before any model loads; may still fill `loaders`.

    Raises the errors of starting, and those of `meanwhile`.
    """
    _fetch_models(config, roles)
    placement = placement or Placement.of(config, roles, plugins)
    if executor is None:
        executor = make_executor(
            config.cluster,
            log_dir=log_dir,
            by_value_modules=plugins.by_value_modules,
            distributions={p.distribution: p.version for p in plugins.list() if p.distribution and p.version},
        )
    with executor:
        # All pools before any worker: the cluster must hold them at one time, and a lack shows before models load.
        pools = [(planned, planned.open(executor)) for planned in placement.pools]
        place = next(pool for planned, pool in pools if REWARD_WORKERS in planned.roles).on_cpu()
        scoring = {REWARD_WORKERS: (rewards, config.reward)}
        further = {each.name: f"{REWARD_WORKERS}/{each.name}" for each in sets if each.rewards is not rewards}
        scoring |= {further[each.name]: (each.rewards, each.config.reward) for each in sets if each.name in further}
        classes = {
            name: ClassWithInitArgs(RewardWorker, functions, limits, config.model)
            for name, (functions, limits) in scoring.items()
        }
        reward = ProcessRequest(place, classes, REWARD_WORKERS)
        clock = StepClock()
        extra = [reward, *group_requests(placement.groups, pools)]
        start = RoleStart(config, plugins, roles, clock, episodes)
        handles, groups = start_roles(start, executor, pools, extra=extra, meanwhile=meanwhile)
        scorers = {name: Scorer(groups.pop(name), *scored_by) for name, scored_by in scoring.items()}
        of_sets = {name: scorers[worker] for name, worker in further.items()}
        own = PluginGroups(placement.groups, groups, config)
        loaders = {} if loaders is None else loaders
        yield Run(config, folder, clock, handles, scorers[REWARD_WORKERS], own, loaders, of_sets)


def _fetch_models(config: Config, roles: Mapping[str, Role]) -> None:
    """Fetch the models that are names on the hub, each once and before any worker starts; workers find them here."""
    model = config.model
    if is_pinned(model.path):
        load_tokenizer(model)  # a model that cannot be used is found before its weights are fetched
    for path in dict.fromkeys([model.path, *(role.model for role in roles.values() if role.model is not None)]):
        model_path(path, code=model.trust_remote_code)


def check_roles(roles: Mapping[str, Role], config: Config, plugins: PluginManager) -> None:
    """Raise ConfigError, before anything starts, for invalid roles: names, kinds, engines, leaders, folders."""
    checks.check_roles(roles, config, plugins, reserved={*vars(Run), "config", "dir", "roles", ROLLOUT})
