"""ReMax: REINFORCE with the greedy response's score as the baseline (arXiv 2310.10505).

For each prompt x a response y is sampled and scored, s(x, y). A second rollout takes the likeliest token at each
position; its score s(x, greedy) is the baseline. The baseline needs no critic and does not depend on y, so it leaves
the expected gradient unchanged. A token's advantage is the response's score above the baseline, minus the KL to the
reference summed from that token on, with KL_t = log pi(y_t) - log pi_ref(y_t):

    A_t = s(x, y) - s(x, greedy) - kl_coef * sum_{u >= t} KL_u          L = - mean over y of [ sum_t A_t log pi(y_t) ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from rlcore import Algorithm, AlgorithmSpec, Config, DataProto, Ragged, Role, Run, hookimpl, option
from rlcore.ops import Outputs, Term, episodes, kl_estimate, masked_sum, metric, needs, objective, one_row_each

RLCORE_API = 1


@dataclass(frozen=True)
class ReMaxConfig:
    """Settings of ReMax."""

    samples: int = option(1, "sampled responses per prompt, in addition to the greedy one", min=1)
    kl_coef: float = option(0.01, "weight of the KL to the frozen reference; 0: no reference", min=0.0)


def remax_advantages(batch: DataProto, *, kl_coef: float) -> dict[str, Ragged]:
    """Return `advantages` as in the module's docstring, 0 on tokens with response_mask 0.

    Reads `scores`, `remax_baseline`, `response_mask` and, with a `kl_coef`, `old_log_probs` and `ref_log_probs`.
    """
    ragged = batch.view("response_mask")
    mask = ragged.to_padded()
    gain = (batch.view("scores") - batch.view("remax_baseline"))[:, None].expand(mask.shape)
    if kl_coef > 0:
        kl = mask * kl_estimate(batch.view("old_log_probs").to_padded(), batch.view("ref_log_probs").to_padded(), "k1")
        gain = gain - kl_coef * kl.flip(1).cumsum(1).flip(1)
    return {"advantages": Ragged.from_padded(mask * gain, ragged.lengths)}


@needs("log_probs", "entropy")
def remax_loss(out: Outputs, batch: Mapping[str, Any], config: ReMaxConfig) -> dict[str, Term]:
    """Return the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    terms = {
        "policy": objective(-masked_sum(batch["advantages"] * out.log_probs, mask), len(mask)),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
    }
    if config.kl_coef > 0:
        kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], "k1")
        terms["kl"] = metric(masked_sum(kl, mask), mask.sum())
    return terms


class ReMax(Algorithm):
    """One step: sample responses and generate greedy ones, score both, update the actor by the difference."""

    config_class = ReMaxConfig
    config: ReMaxConfig

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, and the frozen reference if the KL is used."""
        actor = {"actor": Role(trains=True, generates=True)}
        return {**actor, "ref": Role()} if self.config.kl_coef > 0 else actor

    def check(self, config: Config) -> None:
        """Raise ConfigError when samples would be greedy too: every advantage would be 0."""
        config.rollout.require_drawn(
            "a prompt's samples and the greedy response, which is ReMax's baseline,", "every advantage would be 0"
        )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = run.actor.generate(prompts.repeat(self.config.samples))
        greedy = run.actor.generate(prompts, temperature=0.0)
        rewards = run.reward(batch)
        # record=False: the step's reward and length metrics cover only the samples.
        greedy = greedy.union(run.reward(greedy, record=False))
        batch = batch.union(rewards)
        first = one_row_each(episodes(greedy))[0]
        run.log({"remax/greedy_score": float(greedy["scores"][first].mean())})
        run.log({"remax/dropped_prompts": len(set(batch["uid"]) - set(greedy["uid"]))})
        by_prompt: dict[str, list[float]] = {}
        for uid, score in zip(greedy["uid"], greedy["scores"].tolist(), strict=True):
            by_prompt.setdefault(uid, []).append(score)
        # A prompt whose greedy episode or reward failed has no baseline; its samples are left out.
        batch = batch[torch.tensor([uid in by_prompt for uid in batch["uid"]], dtype=torch.bool)]
        batch["remax_baseline"] = torch.tensor([fmean(by_prompt[uid]) for uid in batch["uid"]])
        reads = ["scores", "remax_baseline", "response_mask"]
        if self.config.kl_coef > 0:
            batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
            batch = batch.union(run.ref.log_probs(batch, name="ref_log_probs"))
            reads += ["old_log_probs", "ref_log_probs"]
        advantages = batch.map(partial(remax_advantages, kl_coef=self.config.kl_coef), reads=reads)
        return run.actor.update(batch.union(advantages), loss=remax_loss)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register ReMax."""
    return AlgorithmSpec("remax", ReMax)
