"""Accuracy on held-out prompts: while training, and as the command `rlcore eval`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.ops import group_index
from rlcore.protocol import DataProto
from rlcore.run import Run


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found. `metrics` by name; `batch` with the responses and scores, one row a sample."""

    metrics: dict[str, float]
    batch: DataProto


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that k of `samples` responses, `correct` of which are right, hold at least one right one.

    The unbiased estimator of arXiv 2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate_prompts(run: Run, prompts: DataProto) -> Evaluation:
    """Sample `trainer.eval_samples` responses for each prompt at `trainer.eval_temperature` and score them.

    Metrics: accuracy (share of samples with a score of at least `reward.pass_score`), pass@k for k = 1, 2, 4, ... up to
    the samples per prompt where there are several, the mean score, the mean response length, the share that was cut off,
    and how many samples and reward errors there were.
    """
    config = run.config
    samples = config.trainer.eval_samples
    batch = run.actor.generate(
        prompts.repeat(samples), purpose="eval", temperature=config.trainer.eval_temperature
    )
    batch = batch.union(run.reward(batch))
    scores = batch["scores"].numpy()
    right = (scores >= config.reward.pass_score) & ~batch["reward_error"].numpy()
    per_prompt = np.bincount(group_index(batch["uid"]).numpy(), weights=right).astype(int)
    metrics = {
        "eval/accuracy": float(right.mean()),
        "eval/score": float(scores.mean()),
        "eval/response_length": float(batch["response_length"].float().mean()),
        "eval/truncated": 1.0 - float(batch["finished"].float().mean()),
        "eval/reward_errors": float(batch["reward_error"].sum()),
        "eval/samples": float(len(batch)),
    }
    k = 1
    while samples > 1 and k <= samples:
        metrics[f"eval/pass@{k}"] = float(np.mean([pass_at_k(samples, int(c), k) for c in per_prompt]))
        k *= 2
    return Evaluation(metrics, batch)


def sample_rows(batch: DataProto, most: int) -> list[dict[str, Any]]:
    """Return the first `most` rows of a scored batch as plain values: what was sampled, what it got, and why."""
    rows = batch[: min(most, len(batch))]
    names = [name for name in ("uid", "sample_index", "prompt_text", "response_text", "answer") if name in rows]
    names += [name for name in rows.keys() if name.startswith("score")]  # noqa: SIM118 (rows is not a dict)
    names += ["response_length", "finished", "reward_error", "reward_detail"]
    columns = {name: rows[name].tolist() for name in names}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
