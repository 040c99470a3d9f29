"""The training loop around an algorithm's step: data, clock, metrics, evaluation, checkpoints, interruption."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from rlcore.collector import resume_collector
from rlcore.config import Config, CurriculumConfig
from rlcore.config.devices import AUTO, device_lines, uses_gpus
from rlcore.config.eval_sets import naming, source_config
from rlcore.data.chat import check_tokens, load_tokenizer, same_tokenizer
from rlcore.data.loader import PromptLoader, check_rendered
from rlcore.data.mix import MixLoader
from rlcore.end_tokens import find_end_tokens
from rlcore.engine.generators import random_state, set_random_state
from rlcore.engine.train import ENGINE_STATE
from rlcore.engine.weights.fingerprint import differences
from rlcore.episodes.from_config import default_reward, environment_files, episode_setup
from rlcore.episodes.setup import EpisodeSetup
from rlcore.errors import CheckpointError, ConfigError, EpisodesError, RewardsError, WeightsError, did_you_mean
from rlcore.exits import work_begins
from rlcore.model_folder import check_positions
from rlcore.plugins import Algorithm, EnvironmentSpec, PluginManager
from rlcore.plugins.entries import OBJECT
from rlcore.plugins.specs import environment_of
from rlcore.protocol import DataProto
from rlcore.rewards.compose import WeightedReward, needing_answer, resolve, reward_files
from rlcore.rewards.scoring import check as check_rewards
from rlcore.rewards.worker import extracts_answers
from rlcore.roles.micro_batches import fit_micro_batches
from rlcore.roles.settings import resolve_roles, role_config, slow_adapters
from rlcore.trackers import Trackers
from rlcore.training import checkpoint
from rlcore.training.eval_sets import EvalSet, PromptsBySet, eval_sets, load_prompts, mix_loader, mix_sources
from rlcore.training.evaluate import OWN, all_metrics, evaluations, sample_rows
from rlcore.training.folder import LOG, RunFolder, default_path, open_folder
from rlcore.training.fork import Source, check_length, source_step, with_source
from rlcore.training.goals import Goals, check_goals
from rlcore.training.health import prompt_results, source_metrics, step_metrics
from rlcore.training.learned import Learned
from rlcore.training.logprob_diff import LogprobDiffWatch
from rlcore.training.no_effect import no_effect_lines
from rlcore.training.preflight import Preflight, preflight
from rlcore.training.run import EndedStep, Run, open_run
from rlcore.training.timeline import Trace, timeline_metrics
from rlcore.workers import Future
from rlcore.workers.gpus import find_gpus

log = logging.getLogger(__name__)


def train(config: Config, plugins: PluginManager, *, checked: Preflight | None = None) -> dict[str, Any]:
    """Train, or go on with the run in the same folder, and return the content of summary.json.

    checked: the preflight of this config, where the caller has done it.
    Faults of the config are found before Ray starts; those of data, model folder, rewards, trackers and run folder
    while the worker processes start, before any model loads. Raises the errors of rlcore.errors; if the loop had begun,
    summary.json then has the status "failed".
    """
    checked = checked or preflight(config, plugins)
    algorithm = checked.algorithm
    dataset = plugins.datasets()[config.data.name].bound(config)
    default = default_reward(config, plugins, dataset)
    rewards = resolve(config.reward, default, plugins.rewards(), plugins.by_value_modules, config.data.answer_key)
    episodes = episode_setup(config, plugins)
    path = default_path(config)
    config = with_source(config, path, checked.roles)
    sources = mix_sources(config, plugins, checked.roles, dataset, rewards)
    sets = eval_sets(config, plugins, checked.roles, dataset, rewards) if config.trainer.eval_every else []
    named = [*sources, *sets]
    extracts = {OWN: extracts_answers(rewards), **{each.name: extracts_answers(each.rewards) for each in named}}
    check_goals(config, algorithm, extracts)
    loaders: dict[str, Loader] = {}
    if config.trainer.epochs is not None:
        loaders = _loaders(algorithm, config, plugins, episodes, sources)
        config = _in_steps(config, loaders["train"])
        # Checks that read the number of steps.
        preflight(config.with_values({"trainer.epochs": None}), plugins)
    check_length(config)
    with _Preparation(config, plugins, algorithm, rewards, sources, sets, episodes, path, loaders) as prepared:
        opened = open_run(
            config,
            path.resolve(),
            plugins,
            checked.roles,
            rewards,
            placement=checked.placement,
            episodes=episodes,
            sets=named,
            loaders=prepared.loaders,
            log_dir=path.resolve() / "logs",
            meanwhile=prepared.make,
        )
        with opened as run:
            trainer = Trainer(
                run,
                algorithm,
                plugins,
                prepared.loaders,
                prepared.folder,
                prepared.trackers,
                prepared.prompts_by_set,
            )
            return trainer.run()


class _Preparation(ExitStack):
    """What a run needs besides its workers: data sets, prompts of `eval.sets`, checked rewards, trackers, run folder.

    `make` makes all of it, while the workers start. The end of the context closes the folder and its log.
    """

    def __init__(
        self,
        config: Config,
        plugins: PluginManager,
        algorithm: Algorithm,
        rewards: list[WeightedReward],
        sources: list[EvalSet],
        sets: list[EvalSet],
        episodes: EpisodeSetup | None,
        path: Path,
        loaders: dict[str, Loader],
    ) -> None:
        """`loaders`: the data sets, if they have been read; else `make` reads them."""
        super().__init__()
        self._given = config, plugins, algorithm, rewards, sources, sets, episodes, path
        self.loaders = loaders
        self.prompts_by_set: list[tuple[EvalSet, DataProto]] = []
        self.trackers: Trackers
        self.folder: RunFolder

    def make(self) -> None:
        """Make everything in order, the run folder last: a fault of the others leaves no folder behind."""
        config, plugins, algorithm, rewards, sources, sets, episodes, path = self._given
        if not self.loaders:
            self.loaders.update(_loaders(algorithm, config, plugins, episodes, sources))
        samples_held_out = bool(config.trainer.eval_every) and config.eval.held_out and not algorithm.evaluates
        train = self.loaders["train"]
        if isinstance(train, MixLoader):
            for source in sources:
                with naming(source.path):
                    _require(train.sources[source.name], algorithm, source.config, source.rewards, samples_held_out)
        else:
            _require(train, algorithm, config, rewards, samples_held_out)
        tokenizer = load_tokenizer(config.model)
        evaluated = [*sources, *sets] if samples_held_out else sets
        self.prompts_by_set += [(each, load_prompts(each, tokenizer, episodes)) for each in evaluated]
        check_rewards(rewards, config.reward)
        further = [each for each in [*sources, *sets] if each.rewards is not rewards]
        for each in further:
            with naming(each.path):
                check_rewards(each.rewards, each.config.reward)
        if episodes is not None:
            episodes.check()
            self.loaders["train"].check_rows(episodes.row_check())
        self.trackers = Trackers(config, path, plugins.trackers())
        self.folder = open_folder(path, config, plugins)
        self.callback(self.folder.close)
        self.enter_context(_logging_to(self.folder.path / LOG))
        self.folder.choose_checkpoint()
        self.folder.check_length(config)
        of_rewards = chain.from_iterable(
            reward_files(own.reward) for own in [config, *(each.config for each in further)]
        )
        for file, digest in [*plugins.local_files.values(), *of_rewards, *environment_files(config)]:
            log.info("code from %s, sha256 %s", file, digest)
        installed = plugins.rewards()
        scoring = [*rewards, *chain.from_iterable(each.rewards for each in further)]
        starts = [installed[reward.name].on_start for reward in scoring if reward.name in installed]
        if name := environment_of(config):
            starts.append(plugins.specs(EnvironmentSpec)[name].on_start)
        for on_start in dict.fromkeys(each for each in starts if each is not None):
            on_start()


Loader = PromptLoader | MixLoader


def _require(
    loader: PromptLoader, algorithm: Algorithm, config: Config, rewards: list[WeightedReward], samples_held_out: bool
) -> None:
    """Raise DataError for rows of a data set without what its reward functions need."""
    by_functions = config.reward.model is None or config.reward.functions or config.reward.path is not None
    loader.require(
        needing_answer(rewards),
        {reward.name: reward.needs_columns for reward in rewards},
        train=algorithm.uses_reward and bool(by_functions),
        held_out=samples_held_out,
    )


def _loaders(
    algorithm: Algorithm,
    config: Config,
    plugins: PluginManager,
    episodes: EpisodeSetup | None,
    sources: list[EvalSet],
) -> dict[str, Loader]:
    """Return the loaders by name: "train" for the run's own prompts, and the algorithm's further data sets."""
    tokenizer = load_tokenizer(config.model)
    tools = None if episodes is None else episodes.offered
    further = algorithm.data(config)
    if "train" in further:
        raise ConfigError(
            f"algo={config.algorithm} calls a further data set 'train', the name of the run's own; rename it"
        )
    if further and sources:
        raise ConfigError(
            f"algo={config.algorithm} reads further data sets ({', '.join(further)}) by keys of `data`, which data.mix "
            "replaces; leave out data.mix, or the keys of the algorithm that name these data sets"
        )
    loaders: dict[str, Loader] = {}
    if sources:
        loaders["train"] = mix_loader(config, sources, tokenizer, episodes)
    # The curriculum is of the run's own prompts.
    further = {name: replace(settings, curriculum=CurriculumConfig()) for name, settings in further.items()}
    for name, settings in ({} if sources else {"train": config.data, **further}).items():
        known = plugins.datasets()
        if settings.name not in known:
            raise ConfigError(
                f"data set {settings.name!r} of {name!r} is not installed.{did_you_mean(settings.name, known)} "
                f"Installed: {', '.join(known)}"
            )
        dataset = known[settings.name].bound(config)
        loaders[name] = PromptLoader(settings, dataset, tokenizer, seed=config.trainer.seed, tools=tools)
    spec = plugins.algorithm(config.algorithm)
    loaders["train"].check_rows(lambda row: plugins.call(spec, "check_row", algorithm.check_row, row))
    columns = chain.from_iterable(loader.columns for loader in loaders.values())
    check_rendered(config.data, list(dict.fromkeys(columns)))
    _check_positions(algorithm, config, max(loader.longest for loader in loaders.values()))
    size = find_end_tokens(config.model, tokenizer).vocab_size
    check_tokens(size, tokenizer, (loader.largest_token for loader in loaders.values()), "prompts")
    return loaders


def _in_steps(config: Config, loader: Loader) -> Config:
    """Return the config with `trainer.epochs` as `trainer.total_steps`."""
    assert isinstance(loader, PromptLoader)  # preflight refuses data.mix
    return config.with_values({"trainer.total_steps": (config.trainer.epochs or 0) * loader.epoch_batches})


def _check_positions(algorithm: Algorithm, config: Config, longest: int) -> None:
    """Raise ConfigError when prompt and response do not fit into the positions of the actor's or another role's model.

    A reward model with another tokenizer reads other tokens, whose number nobody knows yet.
    """
    check_positions(config, longest)
    for name, role in resolve_roles(algorithm.roles(), config).items():
        own = role_config(config, name, role)
        if own.model.path == config.model.path or not same_tokenizer(own.model, config.model):
            continue
        try:
            check_positions(own, longest)
        except ConfigError as error:
            raise ConfigError(f"role {name!r}: {error}") from error


class Trainer:
    """The loop of one run: `run()`. The other methods are its parts, in the order of their first call."""

    def __init__(
        self,
        run: Run,
        algorithm: Algorithm,
        plugins: PluginManager,
        loaders: Mapping[str, Loader],
        folder: RunFolder,
        trackers: Trackers,
        prompts_by_set: PromptsBySet,
    ) -> None:
        self.run_, self.algorithm, self.plugins, self.loaders = run, algorithm, plugins, loaders
        self.loader = loaders["train"]
        self.folder, self.trackers = folder, trackers
        self.config = run.config
        self.started = False
        self.step = 0
        self.tokens = 0.0
        self.seconds = 0.0
        self.accuracy: dict[str, float | None] = {"before": None, "after": None}
        self.goals = Goals(self.config.trainer)
        self.learned = Learned(algorithm.compares_samples and algorithm.uses_reward)
        self.saved_step: int | None = None
        self._last_end = 0.0
        self._known: dict[str, dict[str, int]] = {}
        self._sample_rows = 0
        actor = run.roles.get("actor")
        own = self.config if actor is None else role_config(self.config, "actor", actor.role)
        self._logprob_diff = LogprobDiffWatch(own)
        mixed = {name: source_config(self.config, name) for name in self.config.data.mix}
        self._pass_scores = {name: own.reward.pass_score for name, own in mixed.items()}
        self._trace = Trace(folder.path / "timeline.json") if self.config.trainer.trace else None
        evaluates_held_out = bool(self.config.trainer.eval_every) and self.config.eval.held_out
        if self.config.data.mix and not algorithm.evaluates:
            evaluates_held_out = False  # the sources are evaluated by their names
        self.held_out = self.loader.evaluated() if evaluates_held_out else None
        self.prompts_by_set = prompts_by_set

    def run(self) -> dict[str, Any]:
        """Run all steps and return the summary. The summary is written even if a step raises."""
        status = "failed"
        resume_collector()  # it was paused for the imports, which are done
        work_begins()
        try:
            self._fit_micro_batches()
            self._restore()
            self.folder.go_on(self.config)
            self._fingerprints()
            self.trackers.start(resume_step=self.step, sample_rows=self._sample_rows)
            self.started = True
            self._describe()
            self.plugins.run_start(self.run_)
            with _Interruption() as interruption:
                status = self._loop(interruption)
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else status
            for another in self._close(status):
                log.error("a further error while closing the run: %s", another)
            raise
        if errors := self._close(status):
            raise errors[0]
        return self._summary(status)

    def _fit_micro_batches(self) -> None:
        """Set each role's measured micro-batch, and keep it in the run folder for a resume.

        Before the restore: a measurement counts on an optimizer without moments.
        """
        if self.config.engine.micro_batch_tokens == AUTO and uses_gpus(self.config.cluster):
            kept = self.folder.read_micro_batches()
            if (found := fit_micro_batches(self.run_.roles, self.config, kept)) != kept:
                self.folder.write_micro_batches(found)

    def _describe(self) -> None:
        """Say on which devices and how the run computes, and why."""
        epochs, total = self.config.trainer.epochs, self.config.trainer.total_steps
        length = [] if epochs is None else [f"trainer.epochs={epochs}: {total} steps, {total // epochs} in an epoch"]
        lines = [*length, *self.folder.lines, *device_lines(self.config, find_gpus(self.config.cluster.address))]
        tokenizer = load_tokenizer(self.config.model)
        if found := find_end_tokens(self.config.model, tokenizer).disagreement(tokenizer):
            lines.append(found)
        for name, role in self.run_.roles.items():
            lines += [f"{name}: {group.describe()}" for group in role.groups]
        lines += slow_adapters(self.config, {name: role.role for name, role in self.run_.roles.items()})
        for name, loader in self.loaders.items():
            lines += [f"data {name}: {line}" for line in loader.lines]
        lines += no_effect_lines(self.config, {name: role.role for name, role in self.run_.roles.items()})
        for line in lines:
            log.info("%s", line)
        self.trackers.described(lines)
        if (warmup := self.config.engine.warmup_steps) >= total:
            log.warning(
                "engine.warmup_steps = %d lasts as long as the run of %d steps, so the learning rate never reaches "
                "engine.lr = %g; make it less",
                warmup,
                total,
                self.config.engine.lr,
            )

    def _close(self, status: str) -> list[Exception]:
        """Write the summary, call the hook of the run's end and finish the trackers; return the errors of all three."""
        summary = self._summary(status)
        if status == "finished" and summary["nothing_learned"]:
            log.warning("nothing was learned: %s. See docs/debugging.md", summary["nothing_learned"])
        errors: list[Exception] = []
        ending: list[Callable[[], None]] = []
        if self.started or self.folder.saved is None:  # a resume that does not start leaves what the folder says
            ending.append(lambda: self.folder.write_summary(summary))
        if self.started:
            ending.append(lambda: self.plugins.run_end(self.run_, status))
        ending.append(lambda: self.trackers.finish(status, summary))
        for end in ending:
            try:
                end()
            except Exception as error:  # returned, after the others have ended too
                errors.append(error)
        return errors

    def _loop(self, interruption: _Interruption) -> str:
        total = self.config.trainer.total_steps
        # Also after a resume from a checkpoint of step 0, as the trackers start over then.
        if self.step == 0:
            self._evaluate()
            self.accuracy["before"] = self.accuracy["after"]
            self._save_best()
        every = self.config.trainer.checkpoint_every
        under_way: deque[_OpenStep] = deque()
        while self.step + len(under_way) < total and not (interruption.asked or self.goals.reached):
            step = self.step + len(under_way) + 1
            position = {name: loader.state_dict() for name, loader in self.loaders.items()}
            try:
                under_way.append(self._begin(step))
            except (EpisodesError, RewardsError):
                self._save_before(step, under_way, position)
                raise
            # The last step is saved below.
            saves = bool(every) and step % every == 0 and step < total
            # A checkpoint or an evaluation needs the weights of one step, so no step may be under way.
            drains = saves or self._is_time_to_evaluate(step)
            while len(under_way) > (0 if drains else self.config.trainer.rollouts_ahead):
                self._finish(under_way.popleft())
            if saves:
                self._save()
            self._save_best()
        while under_way:
            self._finish(under_way.popleft())
        if self.saved_step != self.step:
            self._save()
        return "finished" if self.step >= total or self.goals.reached else "interrupted"

    def _save_best(self) -> None:
        """Save the step that has just been evaluated, if it is the best and not saved yet."""
        if self.goals.best_step == self.step and self.saved_step != self.step:
            self._save()

    def _save_before(self, step: int, under_way: deque[_OpenStep], position: Mapping[str, Any]) -> None:
        """Save the state before a step whose episodes or rewards failed; not if it has trained already."""
        while under_way:
            self._finish(under_way.popleft())
        if self.saved_step == self.step or self.run_.has_updated:
            return
        for name, loader in self.loaders.items():
            loader.load_state_dict(position[name])
        self._save()
        log.warning(
            "step %d failed; %s has the state before it: mend what failed and run the same command again",
            step,
            self.folder.checkpoints,
        )

    def _begin(self, step: int) -> _OpenStep:
        """Make all calls of a step. Calls whose results the algorithm did not read may still be running."""
        started, began = time.time(), time.perf_counter()
        self.run_.begin_step(step)
        prompts = self.loader.next_batch()
        returned = self.algorithm.step(self.run_, prompts)
        data = {f"data/{name}": float(count) for name, count in self.loader.counts.items()}
        data["data/left_out_this_epoch"] = float(self.loader.left_out_this_epoch)
        return _OpenStep(
            step, started, began, returned, self.run_.close_step(), self._seconds(), self.run_.spans(), data
        )

    def _finish(self, opened: _OpenStep) -> None:
        """Wait for a step's calls, and log it."""
        logged, scored = opened.ended.wait()
        self.step = opened.step
        metrics = step_metrics(opened.returned, logged, scored, self.config.reward.pass_score)
        metrics.update(source_metrics(scored, self._pass_scores))
        self.loader.learn(prompt_results(scored))
        self.learned.add(metrics, scored)
        metrics.update(opened.seconds())
        # Steps may overlap: a step's time starts at the end of the step before.
        now = time.perf_counter()
        elapsed = now - max(opened.began, self._last_end)
        self._last_end = now
        spans = list(chain.from_iterable(future.get() for future in opened.spans))
        metrics.update(timeline_metrics(spans, opened.started))
        if self._trace is not None:
            self._trace.add(self.step, opened.started, time.time(), spans)
        tokens = metrics.pop("tokens")
        self.tokens += tokens
        self.seconds += elapsed
        self._logprob_diff.warn(self.step, metrics)
        metrics["time/step"] = elapsed
        metrics["throughput/tokens_per_second"] = tokens / elapsed
        metrics["time/left"] = (
            (self.config.trainer.total_steps - self.step) * self.seconds / (self.step - source_step(self.config))
        )
        metrics.update(opened.data)
        if wrong := self._logprob_diff.judge(self.step, metrics):
            self.trackers.log(self.step, metrics)
            raise WeightsError(wrong)
        if self._is_time_to_evaluate(self.step):
            before = random_state()
            try:
                self._evaluate()
            except (EpisodesError, RewardsError):
                self.trackers.log(self.step, metrics)
                self._save()
                raise
            if self.step % self.config.trainer.eval_every:  # only as the last: a longer run goes on as without it
                set_random_state(before)
        self.trackers.log(self.step, metrics)
        if scored:
            self.trackers.samples(self.step, sample_rows(scored[-1], self.config.trainer.samples_per_step))
        self.plugins.step_end(self.run_, self.step, metrics)

    def _seconds(self, prefix: str = "") -> Callable[[], dict[str, float]]:
        """Request each role's seconds by kind of work since the last request, on its slowest rank.

        The returned function waits for the answer.
        """
        asked = {name: role.seconds() for name, role in self.run_.roles.items()}

        def answer() -> dict[str, float]:
            metrics = {}
            for name, seconds in asked.items():
                metrics.update({f"time/{prefix}{name}_{kind}": value for kind, value in seconds.items()})
            return metrics

        return answer

    def _is_time_to_evaluate(self, step: int) -> bool:
        every = self.config.trainer.eval_every
        return bool(every) and (step % every == 0 or step == self.config.trainer.total_steps)

    def _evaluate(self) -> None:
        if self.held_out is None and not self.prompts_by_set:
            return
        self._sync()
        metrics = all_metrics(evaluations(self.run_, self.algorithm, self.held_out, self.prompts_by_set))
        self.run_.end_step()
        metrics.update(self._seconds("eval_")())
        self._last_end = time.perf_counter()  # the evaluation does not count as time of the next step
        self.accuracy["after"] = metrics.get("eval/accuracy")
        self.goals.judge(self.step, metrics, by_algorithm=self.algorithm.evaluates)
        self.trackers.evaluated(self.step, metrics)

    def _sync(self) -> None:
        """Make the next step sample with the newest weights, as after a resume from this step's checkpoint."""
        for role in self.run_.roles.values():
            role.sync()

    def _save(self) -> None:
        # The run must go on from here as a resumed one would: with the newest weights in the rollout pool.
        self._sync()
        keep = self.config.trainer.keep_checkpoints
        path = checkpoint.save(self.folder.checkpoints, self.step, self._write, keep, self.goals.best_step)
        self.saved_step = self.step
        self.trackers.saved(self.step, path)

    def _write(self, aside: Path) -> dict[str, Any]:
        for name, role in self.run_.roles.items():
            if role.role.trains or role.role.follows:
                role.group.save_state(str(aside.resolve() / name))
                if not (aside / name / ENGINE_STATE).is_file():
                    raise CheckpointError(
                        f"role {name!r} wrote its state, but this process cannot see it in {aside.resolve()}; run.dir "
                        "must be on a file system that all nodes share"
                    )
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "accuracy": self.accuracy,
            "goals": self.goals.state_dict(),
            "logprob_diff": self._logprob_diff.first,
            "learned": self.learned.state_dict(),
            "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()},
            "algorithm": {"name": self.config.algorithm, "state": self.algorithm.state_dict()},
            "random": random_state(),
            "sample_rows": self.trackers.sample_rows,
            "fingerprints": self._fingerprints(),
        }
        self.plugins.checkpoint(self.run_, aside)
        return state

    def _fingerprints(self) -> dict[str, dict[str, int]]:
        """Return the fingerprints of all roles, and keep those of frozen roles as the known ones.

        Raises WeightsError for a role whose weights are not the known ones: those at its checkpoint after a resume,
        those at the last call for a frozen role.
        """
        found = {name: role.group.fingerprint()[0] for name, role in self.run_.roles.items()}
        for name, known in self._known.items():
            if wrong := differences(found[name], known):
                raise WeightsError(f"role {name!r} changed without training: {wrong}. Restore its folder or checkpoint")
        frozen = [name for name, role in self.run_.roles.items() if not (role.role.trains or role.role.follows)]
        self._known = {name: found[name] for name in frozen}
        return found

    def _restore(self) -> None:
        path = self.folder.resume_from
        if path is None:
            self._fork()
            return
        state = checkpoint.load(path)
        try:
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
            self.accuracy = state["accuracy"]
            self._logprob_diff.first = state.get("logprob_diff")
            self.goals.load_state_dict(state.get("goals", {}), self.step)
            self.learned.load_state_dict(state.get("learned"))
            # Before the workers load their state: a wrong checkpoint then fails in seconds.
            for name, loader in self.loaders.items():
                loader.load_state_dict(state["loaders"][name])
            self.algorithm.load_state_dict(state["algorithm"]["state"])
            set_random_state(state["random"])
            self._known = state["fingerprints"]
            self._sample_rows = state["sample_rows"]
        except KeyError as error:
            raise _of_another_version(path, error) from error
        for name, role in self.run_.roles.items():
            if role.role.trains or role.role.follows:
                role.group.load_state(str((path / name).resolve()))
        self._sync()
        self.saved_step = self.step
        self._restore_best()
        self.run_.begin_step(self.step)
        log.info("resumed from %s", path)

    def _fork(self) -> None:
        """Begin at `run.source`, a checkpoint of another run; nothing without one.

        Weights, optimizers, positions, noise and the algorithm's state are the checkpoint's, each unless a changed key
        means another one. What tells of the course of a run begins anew: metrics, goals, best, seconds.
        """
        if self.config.run.source is None:
            return
        source = Source(Path(self.config.run.source), self.config, self.plugins)
        self.step = source.step
        self.folder.lines += source.lines
        try:
            for name, loader in self.loaders.items():
                self.folder.lines += source.place(name, loader)
            if source.has_same_algorithm:
                self.algorithm.load_state_dict(self.algorithm.fork_state(source.algorithm_state))
            if source.has_same_seed:
                set_random_state(source.random_state)
        except KeyError as error:
            raise _of_another_version(source.path, error) from error
        for name, role in self.run_.roles.items():
            if not (role.role.trains or role.role.follows):
                continue
            if (saved := source.role(name)) is None:
                self.folder.lines.append(f"{name}: the checkpoint has no such role, so it starts from its model")
                continue
            role.group.load_state(str(saved), not source.has_same_seed)
            if role.role.trains:
                self._known[name] = source.fingerprints[name]
        self._sync()
        self._restore_best()
        self.run_.begin_step(self.step)

    def _restore_best(self) -> None:
        """Link the best checkpoint as of this step, or forget one that a later best, now damaged, has replaced."""
        step, folder = self.goals.best_step, self.folder.checkpoints
        if step is None:
            (folder / checkpoint.BEST).unlink(missing_ok=True)  # of a later step, whose checkpoint is damaged
            return
        wrong = [] if step == self.step else checkpoint.faults(checkpoint.path_of(folder, step))
        if not wrong:
            checkpoint.link_best(folder, step)
            return
        log.warning(
            "the best checkpoint as of step %d, %s, is not whole: %s; the best is chosen anew among later evaluations",
            self.step,
            checkpoint.path_of(folder, step),
            "; ".join(wrong[:5]),
        )
        self.goals.best = None
        (folder / checkpoint.BEST).unlink(missing_ok=True)

    def _summary(self, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "algorithm": self.config.algorithm,
            "steps": self.step,
            "accuracy_before": self.accuracy["before"],
            "accuracy_after": self.accuracy["after"],
            "best": self.goals.best,
            "stopped_at": self.goals.reached,
            "nothing_learned": self.learned.nothing(),
            "train_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "run_dir": str(self.folder.path),
            "plugin_files": [str(path) for path, _ in self.plugins.local_files.values()],
            "plugins_blocked": [plugin.name for plugin in self.plugins.list() if plugin.state == "blocked"],
            "given_in_python": [
                plugin.name for plugin in self.plugins.list() if plugin.kind == OBJECT and plugin.gives
            ],
        }


def _of_another_version(path: Path, error: KeyError) -> CheckpointError:
    """Return the error for a checkpoint whose state lacks a key."""
    return CheckpointError(
        f"{path / checkpoint.STATE} lacks {error}; another version of rlcore wrote it, so go on with that one"
    )


@dataclass
class _OpenStep:
    """A step whose calls have been made and may still be running. `started`: seconds since the epoch."""

    step: int
    started: float
    began: float
    returned: Mapping[str, Any]
    ended: EndedStep
    seconds: Callable[[], dict[str, float]]
    spans: list[Future]
    data: dict[str, float]


class _Interruption:
    """The first Ctrl-C or SIGTERM makes the loop checkpoint and stop after the step; the second stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning(
            "%s: stopping with a checkpoint after this step; send it again to stop now", signal.Signals(number).name
        )

    def __enter__(self) -> _Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send rlcore's log records of this process to a file until the context ends; warnings also go to stderr."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("rlcore")
    before = logger.level
    logger.addHandler(handler)
    # Python prints warnings with `lastResort` only while a logger has no handler; this logger now has one.
    assert logging.lastResort is not None
    logger.addHandler(logging.lastResort)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(logging.lastResort)
        logger.removeHandler(handler)
        handler.close()
