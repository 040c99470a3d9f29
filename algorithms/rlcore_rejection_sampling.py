"""Rejection sampling: supervised learning on the policy's best samples (RAFT, arXiv 2304.06767; best-of-n).

For each prompt x, n responses y_1..y_n are sampled from the current policy and scored. Kept are

    keep=threshold    those with a score of at least `threshold`
    keep=top_k        of those (threshold=null: of all) the k with the highest scores; among equals, the earlier sample

A response that repeats an earlier one of its prompt, token for token, is dropped before the k are chosen, so the kept
ones are distinct. One whose reward function failed is never kept. With K the kept responses of a mini-batch and m_t the
response_mask, the policy minimises the mean negative log-likelihood of their tokens,

    L = - sum_{y in K} sum_t m_t log pi(y_t | x, y_<t) / sum_{y in K} sum_t m_t

at the rollout temperature, in `epochs` passes. Each kept response is also a row of RUN/kept.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataError, DataProto, Run, hookimpl, option
from rlcore.ops import Outputs, Term, episodes, masked_sum, metric, needs, objective

RLCORE_API = 1


@dataclass(frozen=True)
class RejectionSamplingConfig:
    """Settings of rejection sampling."""

    samples: int = option(8, "responses per prompt", min=1)
    keep: Literal["threshold", "top_k"] = option(
        "threshold", "keep the responses that reach `threshold`, or of those the best `top_k` of each prompt"
    )
    threshold: float | None = option(
        None, "lowest score that is kept (default: reward.pass_score for keep=threshold, none for keep=top_k)"
    )
    top_k: int = option(1, "most responses of a prompt that keep=top_k keeps", min=1)
    epochs: int = option(1, "passes over the kept responses", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


def choose(batch: DataProto, *, threshold: float | None, top_k: int | None) -> dict[str, Tensor]:
    """Return `rejection_kept` and `rejection_repeat` (dropped as a duplicate), both bool [rows].

    An episode counts once in `top_k`, and all its branches are kept. Reads `uid`, `responses`, `scores`, `reward_error`
    and the columns of `episodes`; needs all rows of a uid at once.
    """
    uid, responses, scores = batch.view("uid"), batch.view("responses"), batch.view("scores")
    kept = ~batch.view("reward_error")
    if threshold is not None:
        kept &= scores >= threshold
    repeat = torch.zeros_like(kept)
    seen = set()
    for row in kept.nonzero().flatten().tolist():
        tokens = (uid[row], tuple(responses[row].tolist()))
        repeat[row] = tokens in seen
        seen.add(tokens)
    kept &= ~repeat
    if top_k is not None:
        taken: dict[str, set[str]] = {}
        names = episodes(batch)
        for row in scores.argsort(descending=True, stable=True).tolist():
            chosen = taken.setdefault(uid[row], set())
            if kept[row] and len(chosen) < top_k:
                chosen.add(names[row])
            kept[row] = kept[row] and names[row] in chosen
    return {"rejection_kept": kept, "rejection_repeat": repeat}


@needs("log_probs", "entropy")
def imitation_loss(out: Outputs, batch: Mapping[str, Any], config: RejectionSamplingConfig) -> dict[str, Term]:
    """Return L of the module's docstring as `nll`; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    return {
        "nll": objective(-masked_sum(out.log_probs, mask), mask.sum()),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
    }


class RejectionSampling(Algorithm):
    """One step: sample, score, keep the best, write them down, imitate them."""

    config_class = RejectionSamplingConfig
    config: RejectionSamplingConfig

    def __init__(self, config: RejectionSamplingConfig) -> None:
        super().__init__(config)
        self.kept_bytes = 0
        self.empty_steps = 0

    def check(self, config: Config) -> None:
        """Raise ConfigError for settings under which there is nothing to choose between."""
        algo = self.config
        if algo.keep == "top_k" and algo.top_k >= algo.samples and algo.threshold is None:
            raise ConfigError(
                f"algo.keep=top_k with algo.top_k={algo.top_k} of algo.samples={algo.samples} keeps every response; "
                "raise algo.samples, lower algo.top_k, or set algo.threshold"
            )
        if algo.samples > 1:
            config.rollout.require_drawn(
                f"all algo.samples={algo.samples} responses of a prompt", "one is enough: set algo.samples=1"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the length of kept.jsonl in bytes, and the number of steps that kept nothing."""
        return {"kept_bytes": self.kept_bytes, "empty_steps": self.empty_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a `state_dict`."""
        self.kept_bytes, self.empty_steps = state["kept_bytes"], state["empty_steps"]

    def fork_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of another run without the rows of its kept.jsonl."""
        return {**state, "kept_bytes": 0}

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the metrics of the update and of the choice."""
        batch = run.actor.generate(prompts.repeat(self.config.samples))
        batch = batch.union(run.reward(batch))
        chooser = partial(choose, threshold=self._threshold(run.config), top_k=self._top_k)
        reads = ["uid", "responses", "scores", "reward_error", *(["episode", "seat"] if "episode" in batch else [])]
        chosen = batch.map(chooser, reads=reads, keep_together="uid")
        kept = batch[chosen["rejection_kept"]]
        self._write(run.dir / "kept.jsonl", kept, run.step)
        self.empty_steps += len(kept) == 0
        names = episodes(batch)
        kept_names, repeated = (
            {name for name, marked in zip(names, chosen[column].tolist(), strict=True) if marked}
            for column in ("rejection_kept", "rejection_repeat")
        )
        metrics = run.actor.update(
            kept, loss=imitation_loss, epochs=self.config.epochs, mini_batches=self.config.mini_batches
        )
        return {
            **metrics,
            "rejection/kept": len(kept_names) / len(set(names)),
            "rejection/duplicates": len(repeated - kept_names),
            "rejection/prompts_without": 1 - len(set(kept["uid"])) / len(set(batch["uid"])),
            "rejection/empty_steps": self.empty_steps,
        }

    @property
    def _top_k(self) -> int | None:
        return self.config.top_k if self.config.keep == "top_k" else None

    def _threshold(self, config: Config) -> float | None:
        if self.config.threshold is None and self.config.keep == "threshold":
            return config.reward.pass_score
        return self.config.threshold

    def _write(self, path: Path, kept: DataProto, step: int) -> None:
        """Append the kept responses to the file after the first `kept_bytes` bytes, which this run has counted.

        Any rows after those come from steps that a resumed run repeats, so they are deleted. The new rows are on disk
        when this returns, so that a checkpoint never counts missing rows.
        """
        prompts = kept["prompt_text"].tolist()
        if "prompt_messages" in kept:
            prompts = [chat or text for chat, text in zip(kept["prompt_messages"].tolist(), prompts, strict=True)]
        columns = [kept[name].tolist() for name in ("answer", "response_text", "scores")]
        lines = [
            {"prompt": prompt, "answer": answer, "completion": response, "score": score, "step": step}
            for prompt, answer, response, score in zip(prompts, *columns, strict=True)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        try:
            with open(path, "ab") as file:
                if file.tell() < self.kept_bytes:
                    raise DataError(
                        f"{path} has {file.tell()} bytes, but had {self.kept_bytes} at this run's checkpoint; put the "
                        "file back, or start a new run"
                    )
                file.truncate(self.kept_bytes)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error
        self.kept_bytes += len(text.encode())


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register rejection sampling."""
    return AlgorithmSpec("rejection_sampling", RejectionSampling)
