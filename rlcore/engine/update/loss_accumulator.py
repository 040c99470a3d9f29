"""Sums and counts of loss terms. Nothing is divided before they are added up over the mini-batch and all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.engine.update.items import UpdateItem
from rlcore.errors import DataError
from rlcore.ops import Outputs, Term, needs_of
from rlcore.protocol import DataProto, Ragged

Totals = dict[str, tuple[float, float]]
"""Sum and count of each mean, by the name of its metric."""


class LossBatch(Mapping[str, Any]):
    """The columns of some rows as a loss reads them: tensors on the device, ragged ones padded on the right with zeros.

    All columns with one entry per response token get the same padded length. A column is converted at its first read.
    The constants of the update are there too, as numbers.
    """

    def __init__(
        self,
        batch: DataProto,
        device: torch.device,
        rows: Tensor | None = None,
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`rows`: those of the batch that the loss reads, int64; None: all. They keep the batch's padded length."""
        self._batch, self._device, self._rows = batch, device, rows
        self._read: dict[str, Any] = dict(constants)
        self._names = [*batch.keys(), *constants]

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            column = self._batch.view(name)
            if isinstance(column, Ragged):
                column = column.to_padded().to(self._device)
            elif isinstance(column, Tensor):
                column = column.to(self._device, copy=True)  # a loss may write to it
            self._read[name] = column if self._rows is None else column[self._rows]
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def row_names(batch: DataProto, most: int = 8) -> str:
    """Return the rows of a batch as text, by uid and sample_index where there are such columns."""
    uid = batch.view("uid") if "uid" in batch else np.arange(len(batch))
    sample = batch.view("sample_index").tolist() if "sample_index" in batch else [None] * len(batch)
    names = [f"uid={u} sample={s}" if s is not None else f"uid={u}" for u, s in zip(uid, sample, strict=True)]
    return first_of(names, most)


def first_of(names: Sequence[str], most: int = 8) -> str:
    """Return the first `most` names as text, and the number of the others."""
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")


def call_loss(item: UpdateItem, out: Outputs, batch: DataProto, device: torch.device) -> Mapping[str, Term]:
    """Run the item's loss and check its terms. Raises DataError naming the loss and the term.

    Rows with a `row_weight` are given to the loss apart for each weight, which multiplies the totals and the counts.
    """
    if "row_weight" not in batch:
        return _terms(item, out, LossBatch(batch, device, constants=item.constants))
    weights, terms = batch.view("row_weight"), dict[str, Term]()
    for weight in weights.unique().tolist():
        rows = (weights == weight).nonzero()[:, 0]
        given = {name: values[rows.to(values.device)] for name, values in out.given.items()}
        for key, term in _terms(
            item, replace(out, given=given), LossBatch(batch, device, rows, item.constants)
        ).items():
            before = terms.get(key, Term(torch.zeros((), device=term.total.device), 0.0))
            total, count = before.total + weight * term.total, before.count + weight * term.count
            terms[key] = Term(total, count, term.weight)
    return terms


def _terms(item: UpdateItem, out: Outputs, columns: LossBatch) -> Mapping[str, Term]:
    terms = item.loss(out, columns, item.config)
    name = getattr(item.loss, "__name__", repr(item.loss))
    if not isinstance(terms, Mapping) or not all(isinstance(t, Term) for t in terms.values()):
        raise DataError(
            f"loss {name!r} returned {type(terms).__name__}; it must return a dict of terms made by "
            "rlcore.ops.objective(total, count) and rlcore.ops.metric(total, count)"
        )
    for key, term in terms.items():
        if term.total.numel() != 1:
            raise DataError(
                f"loss {name!r}: term {key!r} has a total of shape {tuple(term.total.shape)}; it must be one number, "
                "the sum over the micro-batch"
            )
    if not any(term.weight is not None for term in terms.values()):
        raise DataError(f"loss {name!r} returned metrics only ({', '.join(terms)}); at least one must be an objective")
    return terms


def sum_counts(
    item: UpdateItem, parts: Sequence[DataProto | None], vocab: int, device: torch.device
) -> dict[str, float]:
    """Return the count of each term over all `parts`, by running the loss on two sets of made-up outputs.

    Raises DataError when a count differs between the two, is negative or is not finite.
    """
    counts: dict[str, float] = {}
    for part in parts:
        for key, count in _counts(item, part, vocab, device).items() if part is not None and len(part) else ():
            counts[key] = counts.get(key, 0.0) + count
    return counts


def _counts(item: UpdateItem, batch: DataProto, vocab: int, device: torch.device) -> dict[str, float]:
    tokens = int(batch.view("responses").lengths.max())
    tries = []
    # Two sets of outputs, far apart: a count that depends on outputs most likely differs between them.
    for fill in (0.0, -10.0):
        out = Outputs.blank(needs_of(item.loss), len(batch), tokens, vocab, torch.tensor(fill, device=device))
        with torch.no_grad():
            tries.append({key: float(t.count) for key, t in call_loss(item, out, batch, device).items()})
    for key, count in tries[0].items():
        if tries[1].get(key) != count:
            raise DataError(
                f"the count of loss term {key!r} changes with the model's outputs ({count}, then {tries[1].get(key)}); "
                "a count must depend on batch columns alone: let a mask made from outputs zero the total, not the count"
            )
        if not math.isfinite(count) or count < 0:
            raise DataError(f"the count of loss term {key!r} is {count}; it must be a number of tokens or rows")
    return tries[0]


class LossAccumulator:
    """The sums and counts of one item's loss over one mini-batch, on this rank.

    `scale` multiplies the loss of each micro-batch. `not_finite` lists terms that are not finite, and `faults` counts
    that do not add up, each as a sentence.
    """

    def __init__(self, item: UpdateItem, global_counts: Mapping[str, float], scale: float) -> None:
        self.item, self.global_counts, self.scale = item, global_counts, scale
        self.totals: Totals = {}
        self.largest: dict[str, float] = {}
        self.not_finite: list[str] = []
        self.faults: list[str] = []

    def add_terms(self, terms: Mapping[str, Term], batch: DataProto) -> Tensor:
        """Add one micro-batch's terms and return the scalar to backpropagate: its scaled share of the global mean."""
        loss: Tensor | None = None
        for key, term in terms.items():
            if key not in self.global_counts:
                raise DataError(f"loss term {key!r} appeared only with real outputs; terms may not depend on them")
            total = float(term.total.detach())
            if not math.isfinite(total):
                self.not_finite.append(f"the loss is not finite: term {key!r} is {total} over rows {row_names(batch)}")
            self.add_metric(f"loss/{key}", total, term.count)
            if term.weight is not None and self.global_counts[key] > 0:
                share = term.total * (term.weight * self.item.weight * self.scale / self.global_counts[key])
                loss = share if loss is None else loss + share
        # Without an objective here, a loss of zero still runs the backward, whose collectives other ranks wait in.
        return loss if loss is not None else sum(t.total for t in terms.values()) * 0.0  # type: ignore[return-value]

    def add_metric(self, metric: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to the sum and count of a metric."""
        before = self.totals.get(metric, (0.0, 0.0))
        self.totals[metric] = (before[0] + float(total), before[1] + float(count))

    def track_max(self, metric: str, value: Tensor | float) -> None:
        """Keep the largest value of a metric; NaN counts as larger than any."""
        self.largest[metric] = larger(self.largest.get(metric, -math.inf), float(value))

    def check_counts(self, counted: Mapping[str, float]) -> None:
        """Note a fault for each term whose counts over micro-batches do not add up to that of the mini-batch."""
        for key, count in counted.items():
            got = self.totals.get(f"loss/{key}", (0.0, 0.0))[1]
            # Counts may be sums of fractional weights, which float32 rounds differently for each cut.
            if not math.isclose(got, count, rel_tol=1e-4, abs_tol=1e-6):
                self.faults.append(
                    f"the counts of loss term {key!r} add up to {got} over the micro-batches, but to {count} over the "
                    "mini-batch; a count must depend on batch columns alone and be a sum over rows"
                )


def larger(one: float, other: float) -> float:
    """Return the larger of two numbers, NaN if one is."""
    return other if math.isnan(other) or other > one else one


def merge_totals(all_totals: list[Totals]) -> Totals:
    """Return sums and counts added over ranks (or steps), terms in order of first appearance."""
    merged: Totals = {}
    for totals in all_totals:
        for key, (total, count) in totals.items():
            before = merged.get(key, (0.0, 0.0))
            merged[key] = (before[0] + total, before[1] + count)
    return merged
