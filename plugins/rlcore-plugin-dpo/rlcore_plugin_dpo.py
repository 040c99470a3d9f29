"""DPO: direct preference optimisation on a data set of pairs (arXiv 2305.18290).

Each row of the data set holds a prompt x and two responses, `chosen` y_w and `rejected` y_l. Let h be the log-ratio of
a whole response to the frozen reference, summed over its tokens, and D the difference within a pair,

    h(y) = sum_t log pi(y_t) - log pi_ref(y_t)                D = h(y_w) - h(y_l)

the policy minimises the mean over the pairs of a mini-batch of

    sigmoid   (1 - e) f(D) + e f(-D),  f(D) = -log sigmoid(beta D)     DPO, equation 7; e > 0: conservative DPO
    ipo       (1 - e) f(D) + e f(-D),  f(D) = (D - 1 / (2 beta))^2     IPO, arXiv 2310.12036, equation 17
    hinge     (1 - e) f(D) + e f(-D),  f(D) = max(0, 1 - beta D)       SLiC-HF, arXiv 2305.10425, on log-ratios
    robust    ((1 - e) f(D) - e f(-D)) / (1 - 2 e), f of sigmoid       robust DPO, arXiv 2403.00409, equation 12

with e = label_smoothing, the assumed share of wrong preferences, plus nll_coef times the mean negative log-likelihood
of the chosen responses' tokens (RPO, arXiv 2404.19733, equation 1, has it over the response's length; here all tokens
of the mini-batch have the same weight). An evaluation compares the held-out pairs: `accuracy` is the share with D > 0
(a pair with D = 0 counts half), `margin` the mean of beta D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataError, DataProto, Role, Run, hookimpl, option
from rlcore.ops import Outputs, Term, masked_sum, metric, needs, objective, preference_terms

RLCORE_API = 1

SIDES = {"chosen": 1.0, "rejected": -1.0}


@dataclass(frozen=True)
class DPOConfig:
    """Settings of DPO."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = option("sigmoid", "loss of a pair")
    beta: float = option(0.1, "strength of the pull to the reference", min=1e-6)
    label_smoothing: float = option(0.0, "assumed share of wrong preferences, below 0.5", min=0.0, max=0.5)
    nll_coef: float = option(0.0, "weight of the chosen responses' negative log-likelihood", min=0.0)
    epochs: int = option(1, "passes over each step's pairs", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


def pair_terms(log_probs: Tensor, batch: Mapping[str, Any], config: DPOConfig) -> dict[str, Term]:
    """Return the mean loss of the pairs of a batch, padded to [rows, tokens] as `log_probs` is, and their metrics."""
    pair, side = batch["dpo_pair"], batch["dpo_side"]
    smoothing = config.label_smoothing
    return preference_terms(log_probs, batch, pair, side, kind=config.loss, beta=config.beta, label_smoothing=smoothing)


@needs("log_probs", "entropy")
def dpo_loss(out: Outputs, batch: Mapping[str, Any], config: DPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    terms = pair_terms(out.log_probs, batch, config)
    terms["entropy"] = metric(masked_sum(out.entropy, mask), mask.sum())
    if config.nll_coef > 0:
        chosen = mask * (batch["dpo_side"] > 0)[:, None]
        terms["nll"] = objective(-masked_sum(out.log_probs, chosen), chosen.sum(), weight=config.nll_coef)
    return terms


class DPO(Algorithm):
    """One step: encode the pairs of the batch, score them with the reference, update the actor."""

    config_class = DPOConfig
    uses_reward = False
    config: DPOConfig

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, which never generates, and the frozen reference."""
        return {"actor": Role(trains=True), "ref": Role()}

    def check(self, config: Config) -> None:
        """Raise ConfigError for a temperature other than 1, preferences without information, and empty mini-batches."""
        if config.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature={config.rollout.temperature:g}: log-probs are at that temperature, so DPO would "
                "fit a distribution other than the model's; leave it at 1"
            )
        if self.config.label_smoothing == 0.5:
            raise ConfigError("algo.label_smoothing=0.5 treats every preference as a coin toss; set it below 0.5")
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} pairs; make it at most {config.data.batch_size}"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without two different responses."""
        for side in SIDES:
            if not isinstance(row.get(side), str):
                raise DataError(
                    f"column {side!r} holds {row.get(side)!r:.80}, not a response; its columns are {', '.join(row)}. "
                    "A preference pair needs a prompt, and in `chosen` and `rejected` a text or one message of the "
                    "assistant; put the messages before it into the prompt"
                )
        if row["chosen"] == row["rejected"]:
            raise DataError(f"both sides are {row['chosen']!r:.80}, so there is no preference; remove the pair")

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = self._pairs(run, prompts)
        at_limit = batch["responses"].lengths == run.config.rollout.response_len
        equal = len(prompts) - len(batch) // len(SIDES)
        run.log({"dpo/at_limit": float(at_limit.double().mean()) if len(batch) else 0.0, "dpo/equal_pairs": equal})
        return run.actor.update(
            batch,
            loss=dpo_loss,
            epochs=self.config.epochs,
            mini_batches=self.config.mini_batches,
            keep_together="dpo_pair",
        )

    def evaluate(self, run: Run, held_out: DataProto) -> Mapping[str, float]:
        """Return accuracy and margin of the held-out pairs."""
        batch = self._pairs(run, held_out)
        if not len(batch):
            raise DataError(
                f"all {len(held_out)} held-out pairs are equal in their first rollout.response_len="
                f"{run.config.rollout.response_len} tokens, so none holds a preference; raise it, or mend the data"
            )
        batch = batch.union(run.actor.log_probs(batch, name="dpo_log_probs"))
        padded = {name: batch[name].to_padded() for name in ("response_mask", "ref_log_probs", "dpo_log_probs")}
        columns = {**padded, "dpo_pair": batch["dpo_pair"], "dpo_side": batch["dpo_side"]}
        terms = pair_terms(padded["dpo_log_probs"], columns, self.config)
        means = {name: float(terms[name].total / terms[name].count) for name in ("accuracy", "margin", "preference")}
        return {**means, "pairs": len(batch) // len(SIDES)}

    def _pairs(self, run: Run, prompts: DataProto) -> DataProto:
        """Return two rows per pair, first all chosen and then all rejected responses, with the reference's log-probs.

        Adds `dpo_pair` int64 [rows], the number of a row's pair, and `dpo_side` fp32 [rows], 1 for the chosen and -1
        for the rejected response.
        """
        batch = DataProto.concat(run.encode_pairs(prompts, *SIDES))
        pairs = len(batch) // len(SIDES)
        batch["dpo_pair"] = torch.arange(pairs).repeat(len(SIDES))
        batch["dpo_side"] = torch.tensor(list(SIDES.values())).repeat_interleave(pairs)
        return batch.union(run.ref.log_probs(batch, name="ref_log_probs"))


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register DPO."""
    return AlgorithmSpec("dpo", DPO)
