"""The loss contract: what a loss function returns, and how it says what it needs.

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

Need = Literal["log_probs", "entropy", "logits", "values", "scores"]
NEEDS: tuple[Need, ...] = ("log_probs", "entropy", "logits", "values", "scores")

Loss = Callable[["Outputs", Mapping[str, Any], Any], Mapping[str, "Term"]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Term:
    """One named term of a loss: a sum and what it is divided by, never a mean.

    `total` is a scalar tensor, `count` a number or scalar tensor that depends on batch columns alone: the engine sums
    the counts over the mini-batch and all ranks before the first backward and divides by that, so a gradient cannot
    depend on how the batch was cut. `weight` None makes the term a metric only; otherwise weight * total / count is
    added to what is minimised.
    """

    total: Tensor
    count: Tensor | float
    weight: float | None = None


def objective(total: Tensor, count: Tensor | float, weight: float = 1.0) -> Term:
    """Return a term that is minimised, `weight` times its global mean."""
    return Term(total, count, weight)


def metric(total: Tensor, count: Tensor | float) -> Term:
    """Return a term that is only reported, as its global mean."""
    return Term(total.detach(), count, None)


@dataclass(frozen=True)
class Outputs:
    """What the model gives for the response tokens of a micro-batch, [rows, tokens], 0 where a row has no token.

    Of a policy: `log_probs` of the batch's `responses`, at the rollout temperature, fp32, in nats; `entropy` of the
    distribution at each position, fp32, in nats; `logits` [rows, tokens, vocab]. Of a critic: `values`, fp32. Of a
    reward model: `scores`, fp32 [rows]. Each is there only if the loss declares the need.
    """

    given: Mapping[str, Tensor]

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

    def clipped_surrogate(
        self, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
    ) -> tuple[Tensor, Tensor]:
        """Return PPO's surrogate and where clipping lowered it, both [rows, tokens]; the surrogate is to be maximised.

        With the ratio r = exp(log_probs - old_log_probs) and the advantage A of a token,

            surrogate = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

        `old_log_probs` is [rows, tokens], in nats; `advantages` is [rows, tokens], or [rows, 1] for one per row. No
        gradient reaches the log-probs of clipped tokens. Sources: arXiv 1707.06347, eq. 7; two separate bounds: DAPO,
        arXiv 2503.14476, section 3.1.
        """
        ratio = (self.log_probs - old_log_probs).exp()
        unclipped = ratio * advantages
        surrogate = unclipped.minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
        return surrogate, surrogate < unclipped

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
        """Return outputs that are all `fill` (a scalar), to run a loss for its counts alone; they take no memory."""
        shapes = {"logits": (rows, tokens, vocab), "scores": (rows,)}
        return Outputs({name: fill.expand(shapes.get(name, (rows, tokens))) for name in needs})


def needs(*names: Need) -> Callable[[F], F]:
    """Declare which outputs a loss uses; without it, `log_probs` alone. Raises ValueError for other names."""
    for name in names:
        if name not in NEEDS:
            raise ValueError(f"a loss cannot need {name!r}; allowed: {', '.join(NEEDS)}")

    def mark(function: F) -> F:
        function.__rlcore_needs__ = names  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(loss: Callable[..., Any]) -> tuple[Need, ...]:
    """Return what a loss declared with `needs`, or ("log_probs",)."""
    return getattr(loss, "__rlcore_needs__", ("log_probs",))
