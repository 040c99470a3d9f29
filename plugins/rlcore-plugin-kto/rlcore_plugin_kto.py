"""KTO: Kahneman-Tversky optimisation on single responses that are marked good or bad (arXiv 2402.01306).

Each row of the data set holds a prompt x, a response y (`completion`) and whether it is good (`label`). Let h be the
log-ratio of a whole response to the frozen reference, summed over its tokens,

    h(y) = sum_t log pi(y_t) - log pi_ref(y_t)

the policy minimises the mean over rows of (section 4.1, equation 8)

    good   good_weight (1 - sigmoid(beta (h(y) - z)))             bad   bad_weight (1 - sigmoid(beta (z - h(y))))

The reference point z estimates the KL of the policy to the reference, max(0, mean of h(y') over the step's prompts),
where y' is the response of the next row of the batch with another prompt; rows without one do not count. It has no
gradient and is that of the policy before the step's updates, so it depends neither on micro-batches nor on
mini-batches. The paper advises a ratio of good_weight times the number of good rows to bad_weight times the number of
bad rows between 1 and 4/3. An evaluation measures the held-out rows: `accuracy` is the share of rows with h(y) > z for
good and h(y) < z for bad ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataError, DataProto, Role, Run, hookimpl, option
from rlcore.ops import Outputs, Term, masked_sum, metric, needs, objective

RLCORE_API = 1


@dataclass(frozen=True)
class KTOConfig:
    """Settings of KTO."""

    beta: float = option(0.1, "strength of the pull to the reference", min=1e-6)
    good_weight: float = option(1.0, "weight of good responses", min=0.0)
    bad_weight: float = option(1.0, "weight of bad responses", min=0.0)
    epochs: int = option(1, "passes over each step's rows", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


@needs("log_probs", "entropy")
def kto_loss(out: Outputs, batch: Mapping[str, Any], config: KTOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask, good = batch["response_mask"], batch["kto_good"]
    advance = log_ratio(out.log_probs, batch["ref_log_probs"], mask) - batch["kto_kl"]
    side = torch.where(good, 1.0, -1.0)
    weight = torch.where(good, config.good_weight, config.bad_weight)
    loss = weight * torch.sigmoid(-config.beta * side * advance)  # 1 - sigmoid(x) = sigmoid(-x)
    return {
        "kto": objective(loss.sum(), len(good)),
        "accuracy": metric((side * advance > 0).sum(), len(good)),
        "good_reward": metric((config.beta * advance)[good].sum(), good.sum()),
        "bad_reward": metric((config.beta * advance)[~good].sum(), (~good).sum()),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
    }


def log_ratio(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return h [rows], in nats, of log-probs [rows, tokens]."""
    return masked_sum(log_probs - ref_log_probs, mask, dim=-1)


def with_other_prompts(prompts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the rows that are followed, in a circle, by a row with another prompt, and the first such row of each."""
    count = len(prompts)
    found = {
        row: next(
            ((row + ahead) % count for ahead in range(1, count) if prompts[(row + ahead) % count] != prompt), None
        )
        for row, prompt in enumerate(prompts)
    }
    pairs = [(row, other) for row, other in found.items() if other is not None]
    return [row for row, _ in pairs], [other for _, other in pairs]


class KTO(Algorithm):
    """One step: encode the responses, estimate the reference point, update the actor."""

    config_class = KTOConfig
    uses_reward = False
    config: KTOConfig

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, which never generates, and the frozen reference."""
        return {"actor": Role(trains=True), "ref": Role()}

    def check(self, config: Config) -> None:
        """Raise ConfigError for a temperature other than 1, single rows, no weight at all, and empty mini-batches."""
        if config.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature={config.rollout.temperature:g}: log-probs are at that temperature, so KTO would "
                "fit a distribution other than the model's; leave it at 1"
            )
        if config.data.batch_size < 2:
            raise ConfigError("data.batch_size=1: the reference point needs another row's response; make it at least 2")
        if self.config.good_weight == self.config.bad_weight == 0:
            raise ConfigError("algo.good_weight and algo.bad_weight are both 0, so nothing is learned; raise one")
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} rows; make it at most {config.data.batch_size}"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without a response, or without a label that says whether it is good."""
        if not isinstance(row.get("completion"), str):
            raise DataError(
                f"column 'completion' holds {row.get('completion')!r:.80}, not a response; its columns are "
                f"{', '.join(row)}. KTO needs a prompt, `label`, and in `completion` a text or one message of the "
                "assistant; put the messages before it into the prompt"
            )
        if row.get("label") not in (True, False):
            raise DataError(
                f"column 'label' holds {row.get('label')!r:.80}; it must be true for a good response, else false"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = self._rows(run, prompts)
        run.log({"kto/kl": float(batch["kto_kl"][0]), "kto/good": float(batch["kto_good"].double().mean())})
        return run.actor.update(batch, loss=kto_loss, epochs=self.config.epochs, mini_batches=self.config.mini_batches)

    def evaluate(self, run: Run, held_out: DataProto) -> Mapping[str, float]:
        """Return the held-out rows' accuracy and mean rewards by label; a row whose h equals z is wrong."""
        batch = self._rows(run, held_out)
        advance = self._log_ratio(run, batch) - batch["kto_kl"]
        good = batch["kto_good"]
        accuracy = torch.where(good, advance > 0, advance < 0).double().mean()
        return {"accuracy": float(accuracy), "kl": float(batch["kto_kl"][0]), "rows": len(good)}

    def _rows(self, run: Run, prompts: DataProto) -> DataProto:
        """Return the rows with their responses and the reference's log-probs.

        Adds `kto_good` bool [rows], and `kto_kl` fp32 [rows], z of the module's docstring, equal in all rows.
        """
        responses = run.encode(prompts, "completion")
        rows, others = with_other_prompts(list(prompts["prompt_text"]))
        kl = torch.zeros(())
        if rows:
            mismatched = prompts[rows].union(responses[others])
            mismatched = mismatched.union(run.ref.log_probs(mismatched, name="ref_log_probs"))
            kl = self._log_ratio(run, mismatched).mean().clamp(min=0)
        batch = prompts.union(responses)
        batch["kto_kl"] = kl.expand(len(batch)).clone()
        batch["kto_good"] = torch.tensor([bool(label) for label in batch["label"]])
        return batch.union(run.ref.log_probs(batch, name="ref_log_probs"))

    def _log_ratio(self, run: Run, batch: DataProto) -> Tensor:
        """Return h [rows] of the policy as it is now."""
        policy = run.actor.log_probs(batch, name="kto_log_probs")["kto_log_probs"]
        return log_ratio(policy.to_padded(), batch["ref_log_probs"].to_padded(), batch["response_mask"].to_padded())


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register KTO."""
    return AlgorithmSpec("kto", KTO)
