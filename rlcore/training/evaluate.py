"""Accuracy on held-out prompts: during training, and as the command `rlcore eval`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.config import Config
from rlcore.data.chat import check_tokens, load_tokenizer
from rlcore.data.loader import held_out_prompts
from rlcore.end_tokens import find_end_tokens
from rlcore.episodes.from_config import default_reward, episode_setup
from rlcore.errors import CheckpointError
from rlcore.exits import work_begins
from rlcore.model_folder import check_positions
from rlcore.ops import episodes, group_index, one_row_each
from rlcore.plugins import Algorithm, PluginManager, Role
from rlcore.protocol import DataProto
from rlcore.rewards.compose import needing_answer, resolve
from rlcore.rewards.failures import check_failures, one_score_each
from rlcore.roles.placement import Placement, plan_pools, restrict_to_roles
from rlcore.roles.settings import evaluated_roles, with_settings
from rlcore.training.checkpoint import newest_whole
from rlcore.training.folder import CONFIG
from rlcore.training.run import Run, open_run


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: `metrics` by name, and `batch` with responses and scores, one row per sample."""

    metrics: dict[str, float]
    batch: DataProto


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that k out of `samples` responses, `correct` of them right, include a right one.

    The unbiased estimator of arXiv 2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate_prompts(run: Run, prompts: DataProto) -> Evaluation:
    """Sample `trainer.eval_samples` responses for each prompt at `trainer.eval_temperature` and score them.

    Metrics, as eval/NAME: accuracy (share of samples with a score of at least `reward.pass_score`), pass@k for k = 1,
    2, 4, ... up to the number of samples per prompt if that is above 1, the mean score, the mean response length, the
    share of truncated responses, and the numbers of samples and of reward errors. Samples without a reward are neither
    right nor wrong: accuracy, pass@k and score leave them out. An episode with several branches is one sample; the
    length and the share of truncated responses are means over rows.

    Raises RewardsError when more than the share `reward.max_failures` of the samples have no reward.
    """
    config = run.config
    samples = config.trainer.eval_samples
    batch = run.actor.generate(prompts.repeat(samples), purpose="eval", temperature=config.trainer.eval_temperature)
    scored = run.score_by_functions(batch)
    check_failures(batch, scored, config.reward.max_failures)
    batch = batch.union(one_score_each(batch, scored))
    # Beside a reward model, functions may apply to no part of a sample; an evaluation counts functions only.
    named = [scored[name] for name in scored.keys() if name.startswith("score/")]  # noqa: SIM118 (not a dict)
    unscored = torch.stack([values.isnan() for values in named]).all(0) if named else torch.zeros(len(batch)).bool()
    rewarded = batch[~(scored.view("reward_error") | unscored)]
    rewarded = rewarded[one_row_each(episodes(rewarded))[0]]
    scores = rewarded["scores"].numpy()
    right = scores >= config.reward.pass_score
    names = list(rewarded["uid"])
    if "seat" in rewarded:  # the seats of a game count apart
        names = [f"{uid} {seat}" for uid, seat in zip(names, rewarded["seat"].tolist(), strict=True)]
    prompt = group_index(names).numpy()
    correct = np.bincount(prompt, weights=right).astype(int)
    # Fewer than `eval_samples` where an episode or a reward failed.
    sampled = np.bincount(prompt)
    metrics = {
        "eval/accuracy": float(right.mean()),
        "eval/score": float(scores.mean()),
        "eval/response_length": float(batch["response_length"].float().mean()),
        "eval/truncated": 1.0 - float(batch["finished"].float().mean()),
        "eval/reward_errors": float(batch["reward_error"].sum()),
        "eval/samples": float(len(set(episodes(batch)))),
    }
    if "episode" in batch:
        metrics["eval/failed_episodes"] = float(len(prompts) * samples - len(set(batch["episode"])))
    k = 1
    while samples > 1 and k <= samples:
        found = [pass_at_k(int(n), int(c), k) for n, c in zip(sampled, correct, strict=True) if n >= k]
        if found:
            metrics[f"eval/pass@{k}"] = float(np.mean(found))
        k *= 2
    return Evaluation(metrics, batch)


def held_out_metrics(run: Run, algorithm: Algorithm | None, held_out: DataProto) -> dict[str, float]:
    """Return the metrics eval/NAME of the algorithm's own `evaluate`, or of `evaluate_prompts` if it has none."""
    if algorithm is None or not algorithm.evaluates:
        return evaluate_prompts(run, held_out).metrics
    return {f"eval/{name}": float(value) for name, value in algorithm.evaluate(run, held_out).items()}


def evaluate(target: Path, config: Config, plugins: PluginManager) -> dict[str, float]:
    """Evaluate a run's newest checkpoint or a model folder on held-out prompts, print and return the metrics.

    `target` is a run folder or a model folder; for a model folder, `config.model.path` names it too. Raises
    CheckpointError for a run without a checkpoint, and the errors of `open_run`.
    """
    algorithm: Algorithm | None = None
    saved: Path | None = None
    if (target / CONFIG).is_file():
        algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo) if config.algorithm else None
        only_actor = algorithm is None or not algorithm.evaluates
        saved = newest_whole(target / "checkpoints", "actor/model" if only_actor else "")
        if saved is None:
            raise CheckpointError(
                f"the run {target} has no checkpoint to evaluate; train longer, or give a model folder"
            )
        if only_actor:
            config = replace(config, model=replace(config.model, path=str((saved / "actor" / "model").resolve())))
    declared = evaluated_roles(algorithm)
    config = restrict_to_roles(config, declared)
    if saved is not None and algorithm is not None and algorithm.evaluates:
        roles = {
            name: _as_saved(role, saved / name / "model") for name, role in with_settings(declared, config).items()
        }
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
    needs = None if algorithm is not None and algorithm.evaluates else needing_answer(rewards)
    tokenizer = load_tokenizer(config.model)
    prompts = held_out_prompts(config.data, dataset, tokenizer, config.data.eval_size, tools, needs)
    check_positions(config, int(prompts["prompts"].lengths.max()))
    size = find_end_tokens(config.model, tokenizer).vocab_size
    check_tokens(size, tokenizer, [int(prompts["prompts"].values.max())], "prompts")
    if episodes is not None:
        episodes.check()
        episodes.check_batch(prompts)
    with open_run(config, target.resolve(), plugins, roles, rewards, placement=placement, episodes=episodes) as run:
        work_begins()
        metrics = held_out_metrics(run, algorithm, prompts)
    for name, value in metrics.items():
        print(f"{name.removeprefix('eval/'):<16} {value:.4g}")
    return metrics


def _as_saved(role: Role, folder: Path) -> Role:
    """Return the frozen role with the checkpoint's weights, or with its own model folder if it has none there."""
    saved = str(folder.resolve()) if folder.is_dir() else role.model
    return replace(role, trains=False, follows=None, model=saved)


def sample_rows(batch: DataProto, most: int) -> list[dict[str, Any]]:
    """Return the first `most` rows of a scored batch as plain values: texts, scores, and details of failed rewards."""
    rows = batch[: min(most, len(batch))]
    names = [name for name in ("uid", "sample_index", "prompt_text", "response_text", "answer") if name in rows]
    names += [name for name in rows.keys() if name.startswith("score")]  # noqa: SIM118 (rows is not a dict)
    names += [name for name in ("episode", "stop_reason", "turns", "episode_messages") if name in rows]
    names += ["response_length", "finished", "weights_version", "reward_error", "reward_detail"]
    columns = {name: rows[name].tolist() for name in names}
    for name, values in columns.items():
        if name.startswith("score"):  # JSON has no NaN
            columns[name] = [None if math.isnan(value) else value for value in values]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
