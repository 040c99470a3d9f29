"""Direct calls of a loss, with made-up model outputs on recorded rows, which can be cut, padded and reordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore import DataProto, Ragged
from rlcore.engine.update.loss_accumulator import LossBatch
from rlcore.engine.update.microbatch import column_values
from rlcore.ops import Outputs, needs_of
from rlcore.protocol.row_groups import row_groups
from rlcore_plugin_testing.algorithm.watch import Item

TOLERANCE = 1e-4
"""Largest relative difference of two fp32 numbers that should be equal; another order of summation makes about 1e-6."""

Leaves = Mapping[str, Tensor]


class WiderBatch(LossBatch):
    """The batch that a loss sees, with ragged columns padded by `extra` more positions than necessary."""

    def __init__(self, batch: DataProto, extra: int, constants: Mapping[str, float]) -> None:
        super().__init__(batch, torch.device("cpu"), constants=constants)
        self._extra = extra

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if self._extra and name in self._batch and isinstance(self._batch.view(name), Ragged):
            return _wider(value, self._extra)
        return value


@dataclass(frozen=True)
class Evaluated:
    """A loss over all rows: each term's global mean, their weighted sum, and its gradient by output."""

    terms: dict[str, float]
    objective: float
    gradient: dict[str, Tensor]


class LossProbe:
    """The loss of a recorded item, on made-up outputs close to those of the sampling policy.

    `leaves` holds the outputs by need, each [rows, tokens, ...]. With `logits`, log-probs and entropy are computed from
    them.
    """

    def __init__(self, item: Item, config: Any, vocab: int, *, spread: float = 0.1) -> None:
        self.item, self.config = item, config
        self.lengths = item.batch.view("responses").lengths
        self.width = int(self.lengths.max())
        self.inside = torch.arange(self.width) < self.lengths[:, None]
        self.units = row_groups(len(item.batch), column_values(item.batch, item.keep_together))
        self.leaves = self._made_up(vocab, spread)

    def _made_up(self, vocab: int, spread: float) -> Leaves:
        generator = torch.Generator().manual_seed(0)
        shape = (len(self.item.batch), self.width)

        def noise(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        names: tuple[str, ...] = needs_of(self.item.loss)
        if "logits" in names:
            return {"logits": noise(*shape, vocab) * self.inside[..., None]}
        # Ratios close to 1, where clipping does not remove the gradient.
        sampled = next((n for n in ("old_log_probs", "rollout_log_probs") if n in self.item.batch), None)
        made = {
            "log_probs": torch.full(shape, -1.0) if sampled is None else self._padded(sampled),
            "entropy": torch.full(shape, 1.0),
            "values": self._padded("values") if "values" in self.item.batch else torch.zeros(shape),
        }
        leaves = {name: (made[name] + spread * noise(*shape)) * self.inside for name in names if name in made}
        return {**leaves, "scores": noise(shape[0])} if "scores" in names else leaves

    def _padded(self, name: str) -> Tensor:
        return self.item.batch.view(name).to_padded(length=self.width)

    def evaluate(
        self,
        parts: Sequence[Sequence[int]] | None = None,
        *,
        extra: int = 0,
        leaves: Leaves | None = None,
        batch: DataProto | None = None,
    ) -> Evaluated:
        """Return the loss over the micro-batches `parts` (lists of rows; default: one of all rows).

        Totals and counts are summed over the parts before the division. `extra` widens every padded column; `leaves`
        and `batch` replace the probe's own.
        """
        batch = self.item.batch if batch is None else batch
        given = {name: leaf.clone().requires_grad_() for name, leaf in (leaves or self.leaves).items()}
        totals: dict[str, Tensor] = {}
        counts: dict[str, float] = {}
        weights: dict[str, float | None] = {}
        for rows in parts or [list(chain.from_iterable(self.units))]:
            columns = WiderBatch(batch[list(rows)], extra, self.item.constants)
            terms = self.item.loss(self._outputs(given, rows, extra), columns, self.config)
            for name, term in terms.items():
                totals[name] = totals.get(name, torch.zeros(())) + term.total
                counts[name] = counts.get(name, 0.0) + float(term.count)
                weights[name] = term.weight
        means = {name: total / counts[name] for name, total in totals.items() if counts[name] > 0}
        objective = sum((means[name] * weight for name, weight in weights.items() if weight and name in means), _ZERO)
        found = torch.autograd.grad(objective + _ZERO, list(given.values()), allow_unused=True, materialize_grads=True)
        scale = self.item.weight
        gradient = {name: scale * grad for name, grad in zip(given, found, strict=True)}
        return Evaluated(
            {name: float(mean.detach()) for name, mean in means.items()}, scale * float(objective.detach()), gradient
        )

    def _outputs(self, given: Leaves, rows: Sequence[int], extra: int) -> Outputs:
        rows = list(rows)
        width = int(self.lengths[rows].max())
        cut = {name: leaf[rows] if leaf.dim() == 1 else leaf[rows, :width] for name, leaf in given.items()}
        if "logits" in cut:
            responses = self.item.batch.view("responses").to_padded(length=self.width)[rows, :width]
            by_token = cut["logits"].log_softmax(-1)
            inside = self.inside[rows, :width]
            cut["log_probs"] = by_token.gather(-1, responses[..., None])[..., 0] * inside
            cut["entropy"] = -(by_token.exp() * by_token).sum(-1) * inside
        names = needs_of(self.item.loss)
        return Outputs({name: _wider(value, extra) for name, value in cut.items() if name in names})

    def push(self, evaluated: Evaluated) -> Tensor:
        """Return [rows]: the rise of each response's log-prob per unit of a small step against the gradient."""
        if "logits" in evaluated.gradient:
            responses = self.item.batch.view("responses").to_padded(length=self.width)
            up = torch.zeros_like(self.leaves["logits"]).scatter_(-1, responses[..., None], 1.0)
            up = up - self.leaves["logits"].softmax(-1)
            return -(evaluated.gradient["logits"] * up * self.inside[..., None]).sum((1, 2))
        return -(evaluated.gradient["log_probs"] * self.inside).sum(1)


_ZERO = torch.zeros(())
_ZERO.requires_grad_()


def difference(one: Evaluated, other: Evaluated) -> str | None:
    """Return in words a term or gradient in which two evaluations differ; None where they are equal up to rounding.

    Gradients are compared row by row, in the probe's order.
    """
    for name in {**one.terms, **other.terms}:
        a, b = one.terms.get(name), other.terms.get(name)
        if a is None or b is None or not abs(a - b) <= 1e-6 + TOLERANCE * max(abs(a), abs(b)):
            return f"term {name!r} was {_number(a)} and is {_number(b)}"
    for name, gradient in one.gradient.items():
        away = (gradient - other.gradient[name]).abs()
        if not bool((away <= 1e-7 + TOLERANCE * gradient.abs().max()).all()):
            row = int(away.flatten(1).amax(1).argmax()) if away.dim() > 1 else int(away.argmax())
            return f"the gradient by {name} changes by up to {float(away.max()):.3g}, in row {row}"
    return None


def _number(value: float | None) -> str:
    return "not there" if value is None else f"{value:.7g}"


def _wider(value: Tensor, extra: int) -> Tensor:
    """Return a padded tensor [rows, width, ...] with `extra` further zeros in its second dimension."""
    return pad(value, (0, 0) * (value.dim() - 2) + (0, extra)) if extra and value.dim() > 1 else value
