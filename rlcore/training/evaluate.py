"""Accuracy on held-out prompts: during training, and as the command `rlcore eval`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from rlcore.adapter_folder import is_adapter
from rlcore.config import Config, RoleConfig
from rlcore.config.eval_sets import naming
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import PromptSplit
from rlcore.episodes.from_config import default_reward, episode_setup
from rlcore.errors import CheckpointError
from rlcore.exits import work_begins
from rlcore.model_folder import with_saved_actor
from rlcore.ops import episodes, one_row_each
from rlcore.plugins import Algorithm, PluginManager, Role
from rlcore.plugins.specs import environment_of
from rlcore.protocol import DataProto
from rlcore.rewards.compose import resolve
from rlcore.rewards.failures import check_failures, first_failure, one_score_each
from rlcore.roles.placement import Placement, plan_pools, restrict_to_roles
from rlcore.roles.settings import evaluated_roles, with_settings
from rlcore.training.checkpoint import chosen_whole, split_target
from rlcore.training.estimates import maj_at_k, pass_at_k, share_with_interval
from rlcore.training.eval_sets import (
    EvalSet,
    PromptsBySet,
    checked_prompts,
    eval_sets,
    load_prompts,
    mix_loader,
    mix_sources,
)
from rlcore.training.folder import CONFIG
from rlcore.training.run import Run, open_run

log = logging.getLogger(__name__)

OWN = ""
"""The name of the evaluation on the run's own held-out prompts, among those of `eval.sets`."""

Prompt: TypeAlias = tuple[str, int, str]
"""A held-out prompt: its uid, the player's seat (0 without seats), and its messages as JSON or else its text.

The messages are the same for two models whose chat templates differ.
"""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: `metrics` by name, and `batch` with responses and scores, one row per sample.

    by_prompt: accuracy, score, pass@k and maj@k of each prompt, by name and then by prompt.
    For an algorithm with an evaluation of its own it is empty, and `batch` has the held-out rows.
    """

    metrics: dict[str, float]
    batch: DataProto
    by_prompt: dict[str, dict[Prompt, float]]


def evaluate_prompts(run: Run, prompts: DataProto, each: EvalSet | None = None) -> Evaluation:
    """Sample `trainer.eval_samples` responses for each prompt at `trainer.eval_temperature` and score them.

    each: an evaluation of `eval.sets`, whose samples, temperature and rewards are then taken, and whose metrics are
    eval/SET/NAME.

    Metrics, as eval/NAME: accuracy (share of samples with a score of at least `reward.pass_score`), pass@k for k = 1,
    2, 4, ... up to the number of samples per prompt if that is above 1, maj@k for the same k from 2 on if a reward
    extracts the answers and no episode has several branches, the mean score, the mean response length, the share of
    truncated responses, and the numbers of samples and of reward errors. NAME_low and NAME_high are the bounds of the
    95 % intervals of accuracy, pass@k and maj@k. Samples without a reward are neither right nor wrong: accuracy,
    pass@k, maj@k and score leave them out. An episode with several branches is one sample; the length and the share of
    truncated responses are means over rows.

    Raises RewardsError when more than the share `reward.max_failures` of the samples have no reward.
    """
    config = run.config if each is None else each.config
    samples = config.trainer.eval_samples
    sampling = {"temperature": config.trainer.eval_temperature} if each is None else each.sampling
    batch = run.actor.generate(prompts.repeat(samples), purpose="eval", **sampling)
    scored = run.score_by_functions(batch, extract=samples > 1, evaluation=None if each is None else each.name)
    check_failures(batch, scored, config.reward.max_failures)
    if failed := int(scored.view("reward_error").sum()):
        log.warning(
            "the evaluation%s leaves out %d of %d samples, which have no reward; %s",
            "" if each is None else f" {each.name}",
            failed,
            len(scored),
            first_failure(batch, scored),
        )
    batch = batch.union(one_score_each(batch, scored))
    # Beside a reward model, functions may apply to no part of a sample; an evaluation counts functions only.
    named = [scored[name] for name in scored.keys() if name.startswith("score/")]  # noqa: SIM118 (not a dict)
    unscored = torch.stack([values.isnan() for values in named]).all(0) if named else torch.zeros(len(batch)).bool()
    rewarded = batch[~(scored.view("reward_error") | unscored)]
    branched = len(set(episodes(rewarded))) < len(rewarded)
    rewarded = rewarded[one_row_each(episodes(rewarded))[0]]
    scores = rewarded["scores"].numpy()
    right = scores >= config.reward.pass_score
    answers = list(rewarded["extracted_answer"]) if "extracted_answer" in rewarded and not branched else None
    rows = _rows_by_prompt(rewarded, prompts)
    by_prompt = _by_prompt(rows, right.tolist(), answers, samples)
    estimates = {"accuracy": share_with_interval(right, list(rewarded["uid"]), len(right))}
    for name, values in by_prompt.items():
        used = sum(len(rows[prompt]) for prompt in values)
        estimates[name] = share_with_interval(list(values.values()), [uid for uid, _, _ in values], used)
    metrics: dict[str, float] = {}
    for name, estimate in estimates.items():
        metrics[f"eval/{name}"] = estimate.value
        metrics[f"eval/{name}_low"] = estimate.low
        metrics[f"eval/{name}_high"] = estimate.high
    metrics |= {
        "eval/score": float(scores.mean()),
        "eval/response_length": float(batch["response_length"].float().mean()),
        "eval/truncated": 1.0 - float(batch["finished"].float().mean()),
        "eval/reward_errors": float(batch["reward_error"].sum()),
        "eval/samples": float(len(set(episodes(batch)))),
    }
    if "episode" in batch:
        metrics["eval/failed_episodes"] = float(len(prompts) * samples - len(set(batch["episode"])))
    if each is not None:
        metrics = {f"eval/{each.name}/{name.removeprefix('eval/')}": value for name, value in metrics.items()}
    means = {
        "accuracy": {prompt: float(right[members].mean()) for prompt, members in rows.items()},
        "score": {prompt: float(scores[members].mean()) for prompt, members in rows.items()},
    }
    return Evaluation(metrics, batch, {**means, **by_prompt})


def _rows_by_prompt(rewarded: DataProto, prompts: DataProto) -> dict[Prompt, list[int]]:
    """Return the rows of each of the held-out prompts; the seats of a game count apart."""
    texts = dict(prompt_keys(prompts))
    uids = list(rewarded["uid"])
    seats = rewarded["seat"].tolist() if "seat" in rewarded else [0] * len(uids)
    rows: dict[Prompt, list[int]] = {}
    for row, (uid, seat) in enumerate(zip(uids, seats, strict=True)):
        rows.setdefault((uid, seat, texts[uid]), []).append(row)
    return rows


def prompt_keys(prompts: DataProto) -> list[tuple[str, str]]:
    """Return the uid of each held-out prompt, with its messages as JSON or else its text."""
    texts = list(prompts["prompt_text"])
    messages = list(prompts["prompt_messages"]) if "prompt_messages" in prompts else [None] * len(texts)
    return [
        (uid, text if chat is None else json.dumps(chat))
        for uid, text, chat in zip(prompts["uid"], texts, messages, strict=True)
    ]


def _by_prompt(
    rows: Mapping[Prompt, list[int]], right: Sequence[bool], answers: Sequence[str | None] | None, samples: int
) -> dict[str, dict[Prompt, float]]:
    """Return pass@k and maj@k of each prompt with at least k samples, by name; a name that no prompt has is left out.

    rows: one row per sample. right: whether each is right. answers: each one's extracted answer; None if no reward
    extracts them. samples: samples per prompt, fewer where one has no reward.
    """
    values: dict[str, dict[Prompt, float]] = {}
    for k in sample_counts(samples):
        for prompt, members in rows.items():
            if len(members) < k:
                continue
            correct = [right[row] for row in members]
            values.setdefault(f"pass@{k}", {})[prompt] = pass_at_k(len(members), sum(correct), k)
            if answers is not None and k > 1:
                votes = [answers[row] for row in members]
                values.setdefault(f"maj@{k}", {})[prompt] = maj_at_k(votes, correct, k)
    return values


def metric_names(config: Config, extracts: bool, name: str = OWN) -> list[str]:
    """Return the names of all metrics that `evaluate_prompts` can give.

    extracts: a reward extracts answers. name: the evaluation's in `eval.sets`, whose config `config` then is.
    """
    counts = sample_counts(config.trainer.eval_samples)
    shares = ["accuracy", *(f"pass@{k}" for k in counts), *(f"maj@{k}" for k in counts if extracts and k > 1)]
    names = [f"{share}{bound}" for share in shares for bound in ("", "_low", "_high")]
    names += ["score", "response_length", "truncated", "reward_errors", "samples"]
    if environment_of(config):
        names.append("failed_episodes")
    return [f"eval/{name}/{metric}" if name else f"eval/{metric}" for metric in names]


def sample_counts(samples: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, ... up to the samples per prompt; none for a single sample."""
    return [2**power for power in range(samples.bit_length())] if samples > 1 else []


def held_out_evaluation(run: Run, algorithm: Algorithm | None, held_out: DataProto) -> Evaluation:
    """Return the evaluation by the algorithm's own `evaluate`, or by `evaluate_prompts` if it has none."""
    if algorithm is None or not algorithm.evaluates:
        return evaluate_prompts(run, held_out)
    metrics = {f"eval/{name}": float(value) for name, value in algorithm.evaluate(run, held_out).items()}
    return Evaluation(metrics, held_out, {})


def evaluations(
    run: Run, algorithm: Algorithm | None, held_out: DataProto | None, sets: PromptsBySet
) -> dict[str, Evaluation]:
    """Return all evaluations by name: on the run's own held-out prompts as OWN, unless None, and those of `sets`.

    The run's own comes first, so that its samples do not depend on the sets. Raises the errors of the evaluations.
    """
    found = {} if held_out is None else {OWN: held_out_evaluation(run, algorithm, held_out)}
    for each, prompts in sets:
        with naming(each.path):
            found[each.name] = evaluate_prompts(run, prompts, each)
    return found


def all_metrics(found: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return the metrics of all evaluations."""
    return {name: value for evaluation in found.values() for name, value in evaluation.metrics.items()}


def evaluate(target: Path, config: Config, plugins: PluginManager) -> dict[str, float]:
    """Evaluate as `evaluate_target` does, print and return the metrics."""
    metrics = all_metrics(evaluate_target(target, config, plugins))
    for line in metric_lines(metrics):
        print(line)
    return metrics


def evaluate_target(target: Path, config: Config, plugins: PluginManager) -> dict[str, Evaluation]:
    """Evaluate a target as `prepare_target` describes it, and return the evaluations as `evaluations` does."""
    return prepare_target(target, config, plugins).run()


@dataclass(frozen=True)
class PreparedTarget:
    """A target whose prompts are loaded and checked, before its models are.

    held_out: the prompts of its own evaluation; None without one. sets: the evaluations of `eval.sets` with theirs.
    """

    algorithm: Algorithm | None
    held_out: DataProto | None
    sets: PromptsBySet
    start: Callable[[], AbstractContextManager[Run]]

    @property
    def prompts(self) -> dict[str, DataProto]:
        """The prompts by the evaluation's name."""
        own = {} if self.held_out is None else {OWN: self.held_out}
        return own | {each.name: prompts for each, prompts in self.sets}

    def naming(self, name: str) -> AbstractContextManager[None]:
        """Say of errors that they are those of this evaluation; of the target's own, nothing."""
        paths = {each.name: each.path for each, _ in self.sets}
        return naming(paths[name]) if name in paths else nullcontext()

    def run(self) -> dict[str, Evaluation]:
        """Start the workers and return all evaluations. Raises the errors of `open_run` and of the evaluations."""
        with self.start() as run:
            work_begins()
            return evaluations(run, self.algorithm, self.held_out, self.sets)


def prepare_target(target: Path, config: Config, plugins: PluginManager) -> PreparedTarget:
    """Load the prompts with which a run's newest checkpoint, one of its checkpoints, or a model folder is evaluated.

    `target` is a run folder, one of its checkpoints (RUN/checkpoints/best) or a model folder; for a model folder,
    `config.model.path` names it too. Raises CheckpointError for a run without a checkpoint and for a damaged one, and
    DataError and ConfigError for prompts that cannot be evaluated on.
    """
    algorithm: Algorithm | None = None
    saved: Path | None = None
    if (split_target(target)[0] / CONFIG).is_file():
        algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo) if config.algorithm else None
        only_actor = algorithm is None or not algorithm.evaluates
        saved = chosen_whole(target, "actor/model" if only_actor else "")
        if saved is None:
            raise CheckpointError(
                f"the run {target} has no checkpoint to evaluate; train longer, or give a model folder"
            )
        if only_actor:
            config = with_saved_actor(config, saved / "actor" / "model")
    declared = evaluated_roles(algorithm)
    config = restrict_to_roles(config, declared)
    if saved is not None and algorithm is not None and algorithm.evaluates:
        declared = with_settings(declared, config)
        roles = {name: _as_saved(role, saved / name / "model") for name, role in declared.items()}
        config = _with_adapters(config, saved, declared)
        placement = Placement.of(config, roles, plugins)
    else:
        # model.path has the weights to evaluate, so the run's own folder for the actor is ignored.
        roles = {name: replace(role, model=None) for name, role in with_settings(declared, config).items()}
        placement = Placement(plan_pools(config, roles, plugins.train_engines()))
    dataset = plugins.datasets()[config.data.name].bound(config)
    episodes = episode_setup(config, plugins)
    tools = None if episodes is None else episodes.offered
    default = default_reward(config, plugins, dataset)
    rewards = resolve(config.reward, default, plugins.rewards(), plugins.by_value_modules, config.data.answer_key)
    sources = mix_sources(config, plugins, roles, dataset, rewards)
    sets = eval_sets(config, plugins, roles, dataset, rewards)
    tokenizer = load_tokenizer(config.model)
    prompts: DataProto | None = None
    loaders = {}
    if config.eval.held_out and sources:
        if algorithm is not None and algorithm.evaluates:
            loaders["train"] = mix_loader(config, sources, tokenizer, episodes)
            prompts = loaders["train"].evaluated()
        else:
            sets = [*sources, *sets]
    elif config.eval.held_out:
        scoring = [] if algorithm is not None and algorithm.evaluates else rewards
        split = PromptSplit(config.data, dataset, tokenizer, "eval", tools)
        prompts = checked_prompts(config, split, "eval", tokenizer, episodes, scoring)
    loaded = [(each, load_prompts(each, tokenizer, episodes)) for each in sets]
    folder = split_target(target)[0].resolve()

    def start() -> AbstractContextManager[Run]:
        scored = {each.name: each for each in [*sources, *sets]}
        return open_run(
            config,
            folder,
            plugins,
            roles,
            rewards,
            placement=placement,
            episodes=episodes,
            sets=[*scored.values()],
            loaders=loaders,
        )

    return PreparedTarget(algorithm, prompts, loaded, start)


def open_actor(config: Config, folder: Path, plugins: PluginManager) -> AbstractContextManager[Run]:
    """Open a run of the actor alone, with the model of `model`: it samples, and is neither trained nor rewarded."""
    declared = evaluated_roles(None)
    config = restrict_to_roles(config, declared)
    roles = {name: replace(role, model=None) for name, role in with_settings(declared, config).items()}
    placement = Placement(plan_pools(config, roles, plugins.train_engines()))
    return open_run(config, folder, plugins, roles, [], placement=placement)


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics as lines of text, without `eval/`; a metric with an interval has it in its line."""
    lines = []
    width = max([16, *(len(name.removeprefix("eval/")) for name in metrics if not name.endswith(("_low", "_high")))])
    for name, value in metrics.items():
        if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in metrics:
            continue
        line = f"{name.removeprefix('eval/'):<{width}} {value:.4g}"
        if f"{name}_low" in metrics:
            line = f"{line:<{width + 10}} 95 % interval {metrics[f'{name}_low']:.4g} to {metrics[f'{name}_high']:.4g}"
        lines.append(line)
    return lines


def _as_saved(role: Role, folder: Path) -> Role:
    """Return the frozen role with the checkpoint's weights, or with its own model folder if it has none there."""
    saved = str(folder.resolve()) if folder.is_dir() and not is_adapter(folder) else role.model
    return replace(role, trains=False, follows=None, model=saved)


def _with_adapters(config: Config, saved: Path, roles: Iterable[str]) -> Config:
    """Return the config in which each role starts from the adapter that the checkpoint has of it, if it has one."""
    own = dict(config.roles)
    for name in roles:
        if is_adapter(folder := saved / name / "model"):
            own[name] = replace(own.get(name, RoleConfig()), lora={"path": str(folder.resolve())})
    return replace(config, roles=own)


def sample_rows(batch: DataProto, most: int) -> list[dict[str, Any]]:
    """Return the first `most` rows of a scored batch as plain values: texts, scores, and details of failed rewards."""
    rows = batch[: min(most, len(batch))]
    texts = ("uid", "mix_source", "sample_index", "prompt_text", "response_text", "answer")
    names = [name for name in texts if name in rows]
    names += [name for name in rows.keys() if name.startswith("score")]  # noqa: SIM118 (rows is not a dict)
    names += [name for name in ("episode", "stop_reason", "turns", "episode_messages") if name in rows]
    names += ["response_length", "finished", "weights_version", "reward_error", "reward_detail"]
    columns = {name: rows[name].tolist() for name in names}
    for name, values in columns.items():
        if name.startswith("score"):  # JSON has no NaN
            columns[name] = [None if math.isnan(value) else value for value in values]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
