"""The loss contract: the terms that a loss function returns, and how it declares the model outputs it needs.

A loss is a plain module-level function `loss(out, batch, config) -> dict[str, Term]`. `out` holds the model's outputs
for the rows of `batch` (an `Outputs`); `batch` maps column names to tensors, ragged columns padded on the right with
zeros to [rows, tokens]; `config` is the algorithm's own dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rlcore.ops.ratio import LOG_RATIO_BOUND, bounded_ratio

Need = Literal["log_probs", "entropy", "logits", "values", "scores"]
NEEDS: tuple[Need, ...] = ("log_probs", "entropy", "logits", "values", "scores")

Loss = Callable[["Outputs", Mapping[str, Any], Any], Mapping[str, "Term"]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Term:
    """One named term of a loss: a sum and its count, never a mean.

    `total` is a scalar tensor. `count` is a number or a scalar tensor, and depends on batch columns only: the engine
    sums it over the mini-batch and all ranks before the first backward, and divides by the sum. So the gradient does
    not depend on how the batch is split. A term with `weight` None is only a metric; otherwise the engine adds
    weight * total / count to the loss.
    """

    total: Tensor
    count: Tensor | float
    weight: float | None = None


def objective(total: Tensor, count: Tensor | float, weight: float = 1.0) -> Term:
    """Return a term to minimise: `weight` times its global mean."""
    return Term(total, count, weight)


def metric(total: Tensor, count: Tensor | float) -> Term:
    """Return a term that is only reported, as its global mean; it has no gradient."""
    return Term(total.detach(), count, None)


@dataclass(frozen=True)
class Outputs:
    """The model's outputs for the response tokens of a micro-batch, [rows, tokens], 0 where a row has no token.

    A policy gives `log_probs` of the batch's `responses`, at the rollout temperature, fp32, in nats; `entropy` of the
    distribution at each position, fp32, in nats; `logits` [rows, tokens, vocab]. A critic gives `values`, fp32. A
    reward model gives `scores`, fp32 [rows]. An output exists only if the loss declares it with `needs`.
    `log_ratio_bound` is `trainer.log_ratio_bound`, in nats.
    """

    given: Mapping[str, Tensor]
    log_ratio_bound: float = LOG_RATIO_BOUND

    def _get(self, name: str) -> Tensor:
        if name not in self.given:
            raise AttributeError(
                f"the loss uses out.{name} but does not declare it; put @needs({name!r}) above the loss"
            )
        return self.given[name]

    @property
    def log_probs(self) -> Tensor:
        """Log-probs of the response tokens, [rows, tokens]."""
        return self._get("log_probs")

    @property
    def entropy(self) -> Tensor:
        """Entropy at each response token, [rows, tokens]."""
        return self._get("entropy")

    @property
    def logits(self) -> Tensor:
        """Logits at each response token, [rows, tokens, vocab], divided by the temperature."""
        return self._get("logits")

    @property
    def values(self) -> Tensor:
        """The critic's estimate of the return before each response token was chosen, [rows, tokens]."""
        return self._get("values")

    @property
    def scores(self) -> Tensor:
        """The reward model's score of each row, [rows]."""
        return self._get("scores")

    def ratio(self, old_log_probs: Tensor) -> Tensor:
        """Return each token's new probability over the old one, [rows, tokens], of `old_log_probs` [rows, tokens].

        The log-ratio is bounded by `log_ratio_bound` before exp: `rlcore.ops.bounded_ratio`.
        """
        return bounded_ratio(self.log_probs - old_log_probs, self.log_ratio_bound)

    def clipped_surrogate(
        self, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float, delta: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return PPO's surrogate of each token and where clipping changed it: `rlcore.ops.clipped_surrogate`.

        `old_log_probs` is [rows, tokens], in nats; `advantages` is [rows, tokens], or [rows, 1] for one per row.
        """
        return clipped_surrogate(self.ratio(old_log_probs), advantages, clip_low, clip_high, delta)

    def clipped_value_error(self, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        """Return the critic's squared error and where clipping raised it, both [rows, tokens].

        With the value V, the value V_old before the update and the return R of a token,

            error = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

        Both arguments are [rows, tokens], in units of reward; `clip` 0 means no clipping. Source:
        https://github.com/openai/baselines, baselines/ppo2/model.py at dfc86c9a.
        """
        unclipped = (self.values - returns).square()
        if clip == 0:
            return unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
        near = old_values + (self.values - old_values).clamp(-clip, clip)
        error = unclipped.maximum((near - returns).square())
        return error, error > unclipped

    @staticmethod
    def blank(needs: Iterable[Need], rows: int, tokens: int, vocab: int, fill: Tensor) -> Outputs:
        """Return outputs filled with `fill` (a scalar), to run a loss only for its counts; they take no memory."""
        shapes = {"logits": (rows, tokens, vocab), "scores": (rows,)}
        return Outputs({name: fill.expand(shapes.get(name, (rows, tokens))) for name in needs})


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's surrogate and where clipping changed it, both [...]; the surrogate is to be maximised.

    With the ratio r [...] of the new to the old probability, of a token or a whole response, and the advantage A [...],

        surrogate = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    `delta` is an upper bound of r in the first product where A is negative, the side that the clip leaves open; one
    below 1 + clip_high acts like 1 + clip_high. No gradient reaches what is clipped. Sources: arXiv 1707.06347, eq. 7;
    two separate bounds: DAPO, arXiv 2503.14476, section 3.1; delta: INTELLECT-2, arXiv 2505.07291.
    """
    unclipped = ratio * advantages
    bounded = unclipped if delta is None else torch.where(advantages < 0, ratio.clamp(max=delta), ratio) * advantages
    surrogate = bounded.minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return surrogate, surrogate != unclipped


def needs(*names: Need) -> Callable[[F], F]:
    """Declare the outputs that a loss uses; without it, only `log_probs`. Raises ValueError for an unknown name."""
    for name in names:
        if name not in NEEDS:
            raise ValueError(f"a loss cannot need {name!r}; allowed: {', '.join(NEEDS)}")

    def mark(function: F) -> F:
        function.__rlcore_needs__ = names  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(loss: Callable[..., Any]) -> tuple[Need, ...]:
    """Return the outputs that a loss declares with `needs`; ("log_probs",) if it declares none."""
    return getattr(loss, "__rlcore_needs__", ("log_probs",))
