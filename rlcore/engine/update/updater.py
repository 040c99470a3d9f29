"""The loss contract: micro-batches, counts, normalisation, corrections and checks, for every train engine.

A loss returns sums and counts. The counts depend on batch columns only, so they are added up over the mini-batch and
all ranks before the first forward. Every backward then divides by the global count, and the gradient does not depend
on micro-batches, padding or the number of ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.engine.update.importance import (
    correct,
    forward_needs,
    is_corrected,
    is_sampled,
    measure_logprob_diff,
    staleness,
)
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.loss_accumulator import (
    LossAccumulator,
    Totals,
    call_loss,
    larger,
    merge_totals,
    sum_counts,
)
from rlcore.engine.update.microbatch import column_values, micro_batches
from rlcore.engine.update.nonfinite import MOST_SKIPPED, LargestGradient, NotFiniteError, explain, largest_gradients
from rlcore.engine.update.schedule import learning_rate
from rlcore.errors import DataError
from rlcore.ops import Need, Outputs, Term, needs_of
from rlcore.protocol import DataProto, Ragged

if TYPE_CHECKING:
    from rlcore.engine.train import TrainEngine

log = logging.getLogger(__name__)

Counts = dict[str, float]
"""The count of each loss term by name."""

Report = tuple[Totals, list[str], list[str], dict[str, float]]
"""One rank's part of one item: sums and counts, faults, terms that are not finite, largest values."""


class Updater:
    """Runs a train engine's forward and update on batches. Every rank of the engine calls each method together."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._ranks = engine.ranks
        self._mesh = engine.mesh

    # Forward

    def compute(self, batch: DataProto, names: Sequence[Need]) -> dict[str, Ragged | Tensor]:
        """Return the outputs `names` of all rows, without a gradient, in the batch's row order.

        Token-level outputs are ragged fp32, as long as `responses`. A reward model's `scores` are fp32 [rows].
        """
        engine = self._engine
        # Micro-batches reorder rows by length; the numbers restore the batch's order at the end.
        numbered = batch.select(["prompts", "responses"], [])
        numbered["row"] = torch.arange(len(batch))
        parts = self._micro_batches(numbered, None)
        padded = self._pad_to_equal_count(parts, self._ranks.gather(len(parts)))
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(part: DataProto | None, outputs: dict[str, Tensor]) -> Tensor:
            if part is not None:
                for name in names:
                    pieces[name].append(outputs[name])
            return torch.zeros((), device=self._ranks.device)

        # Empty on all ranks together, as the counts were gathered: no rank waits for another one's forward.
        if padded:
            engine.forward(padded, names, keep)
        sizes = self._output_sizes(parts)
        order = torch.cat([part.view("row") for part in parts]).argsort().tolist() if parts else []
        columns: dict[str, Ragged | Tensor] = {}
        for name in names:
            flat = torch.cat(pieces[name]) if pieces[name] else torch.zeros(sum(sizes), device=self._ranks.device)
            # Only the last pipeline stage has outputs.
            values = self._mesh.broadcast_from_stage(self._mesh.layout.pp - 1, flat).cpu().split(sizes)
            rows = [values[row] for row in order]
            if engine.kind.scores_rows:
                columns[name] = torch.cat(rows) if rows else torch.zeros(0)
            else:
                columns[name] = Ragged.from_list(rows, dtype=torch.float32)
        return columns

    def _output_sizes(self, parts: Sequence[DataProto]) -> list[int]:
        """Return the number of output values of each row, in the order of the micro-batches."""
        lengths: list[int] = []
        for part in parts:
            lengths += part.view("responses").lengths.tolist()
        return [1] * len(lengths) if self._engine.kind.scores_rows else lengths

    def _micro_batches(self, batch: DataProto, keep_together: str | None) -> list[DataProto]:
        """Cut rows into micro-batches; with pipeline stages, into at least one for each stage."""
        lengths = (batch.view("prompts").lengths + batch.view("responses").lengths).tolist()
        cuts = micro_batches(
            lengths,
            column_values(batch, keep_together),
            self._engine.engine_config.micro_batch_rows,
            self._engine.micro_batch_tokens,
            at_least=self._mesh.layout.pp,
        )
        return [batch[rows] for rows in cuts]

    def _pad_to_equal_count(self, parts: Sequence[DataProto], by_rank: Sequence[int]) -> list[DataProto | None]:
        """Append None up to the busiest rank's number of micro-batches, and up to the number of pipeline stages.

        Every forward may be a collective, so all ranks run equally many.
        """
        stages = self._mesh.layout.pp
        count = max(*by_rank, stages if stages > 1 else 0)
        return [*parts, *[None] * (count - len(parts))]

    # Update

    def update(self, items: Sequence[UpdateItem], *, epochs: int, step: int) -> dict[str, float]:
        """Take one optimizer step for each mini-batch of each epoch and return the metrics.

        `step` is the run's step, from 0, which sets the learning rate. A mini-batch without rows on any rank is
        skipped and counted. Raises DataError on every rank, before the optimizer step, for a frozen role and for a loss
        or gradient that is not finite; the error names the term, the rows and keys that help. With
        `trainer.on_nonfinite=skip` such a step is left out and counted, at most MOST_SKIPPED in a row.
        """
        engine = self._engine
        if not engine.trains:
            raise DataError("this role is frozen; declare it with Role(trains=True) to update it")
        lr = learning_rate(engine.engine_config, step, engine.total_steps)
        behind = staleness(items, engine.version, self._ranks)
        totals: list[Totals] = []
        largest: dict[str, float] = {}
        norms: list[float] = []
        skipped = not_finite = 0
        for _ in range(epochs):
            for index in range(len(items[0].sizes)):
                # After the first optimizer step the weights are no longer those that sampled, so only that is measured.
                done = self._mini_batch([(item, item.mini_batch(index)) for item in items], lr, measure=not norms)
                if done is None:
                    skipped += 1
                    continue
                if not done.taken:
                    not_finite += 1
                    continue
                totals.append(done.totals)
                norms.append(done.gradient_norm)
                for name, value in done.largest.items():
                    largest[name] = larger(largest.get(name, value), value)
        means = {key: total / count for key, (total, count) in merge_totals(totals).items() if count > 0}
        return {
            **means,
            **largest,
            **behind,
            **engine.metrics,
            "train/grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "train/lr": lr,
            "train/optimizer_steps": float(len(norms)),
            "train/skipped_updates": float(skipped),
            "train/nonfinite_updates": float(not_finite),
        }

    def _mini_batch(
        self, work: Sequence[tuple[UpdateItem, DataProto]], lr: float, *, measure: bool
    ) -> _OptimizerStep | None:
        """Accumulate the gradient of one mini-batch and step. None: no rank has anything to optimise.

        `measure`: also record the difference between the weights and the policy that sampled the rows.
        """
        cuts = [self._micro_batches(batch, item.keep_together) for item, batch in work]
        counts = [self._counts(item, batch, parts) for (item, batch), parts in zip(work, cuts, strict=True)]
        # One message for both: a gather costs a round trip over all ranks.
        by_rank = self._ranks.gather(([len(parts) for parts in cuts], counts))
        # The ranks of one model-parallel copy hold the same rows, which count once.
        global_counts = _global_counts(self._mesh.one_per_dp_rank([counts for _, counts in by_rank]))
        if not any(sum(counted.values()) > 0 for counted in global_counts):
            return None
        padded = []
        for index, parts in enumerate(cuts):
            on_each_rank = [lengths[index] for lengths, _ in by_rank]
            padded.append(self._pad_to_equal_count(parts, on_each_rank))
        try:
            done = self._step(work, padded, counts, global_counts, lr, measure=measure)
        except NotFiniteError as error:
            self._engine.zero_grad()
            return self._left_out(str(error), work, padded, lr)
        except Exception:
            # Half a gradient must not remain, neither for the next update nor in memory, if a caller catches the error.
            self._engine.zero_grad()
            raise
        self._engine.skipped_in_a_row = 0
        return done

    def _left_out(
        self,
        cause: str,
        work: Sequence[tuple[UpdateItem, DataProto]],
        padded: Sequence[Sequence[DataProto | None]],
        lr: float,
    ) -> _OptimizerStep:
        """Return a step that was not taken, or raise DataError, on every rank alike: all ranks saw the same norm."""
        found: list[LargestGradient] = []
        for (item, _), parts in zip(work, padded, strict=True):
            found += self._largest_gradients(item, parts) if parts else []
        first = work[0][0]
        message = explain(cause, found, first, lr=lr, dtype=self._engine.dtype)
        if first.numerics.on_nonfinite == "stop":
            raise DataError(message)
        self._engine.skipped_in_a_row += 1
        if self._engine.skipped_in_a_row > MOST_SKIPPED:
            raise DataError(
                f"{self._engine.skipped_in_a_row} optimizer steps in a row were not finite; "
                f"trainer.on_nonfinite=skip leaves out at most {MOST_SKIPPED}. The last one: {message}"
            )
        if self._ranks.rank == 0:
            log.warning("an optimizer step was skipped (trainer.on_nonfinite=skip): %s", message)
        return _OptimizerStep(taken=False)

    def _largest_gradients(self, item: UpdateItem, parts: Sequence[DataProto | None]) -> list[LargestGradient]:
        """Return the largest gradient of each term of an item in each row, of all ranks.

        It runs the forward again, with the same weights, and goes backward from each term to the model's outputs.
        """
        device, found = self._ranks.device, list[LargestGradient]()

        def terms_of(out: Outputs, part: DataProto) -> Mapping[str, Term]:
            if is_corrected(item):
                out = correct(out, part, LossAccumulator(item, {}, 1.0), device)
            return call_loss(item, out, part, device)

        def finish(part: DataProto | None, outputs: dict[str, Tensor]) -> Tensor:
            if part is not None:
                found.extend(largest_gradients(_by_row(outputs, part, item), part, partial(terms_of, part=part)))
            return torch.zeros((), device=device)

        self._engine.forward(parts, forward_needs(item), finish)
        return list(chain.from_iterable(self._mesh.one_per_dp_rank(self._ranks.gather(found))))

    def _counts(self, item: UpdateItem, batch: DataProto, parts: Sequence[DataProto]) -> Counts:
        """Return the count of each loss term over this rank's rows."""
        # One call over all rows reveals a count that depends on the cut. Logits of all rows would not fit in memory.
        rows = parts if "logits" in needs_of(item.loss) else [batch]
        return sum_counts(item, rows, self._engine.vocab_size, self._ranks.device)

    def _step(
        self,
        work: Sequence[tuple[UpdateItem, DataProto]],
        padded: Sequence[Sequence[DataProto | None]],
        counts: Sequence[Counts],
        global_counts: Sequence[Counts],
        lr: float,
        *,
        measure: bool,
    ) -> _OptimizerStep:
        """Go backward through all items' micro-batches and take the optimizer step."""
        self._engine.zero_grad()
        final = max(index for index, parts in enumerate(padded) if parts)
        accumulators: list[LossAccumulator] = []
        for index, (item, _) in enumerate(work):
            # Data-parallel engines average gradients over the ranks, while the counts are already global.
            accumulator = LossAccumulator(item, global_counts[index], scale=float(self._mesh.layout.dp))
            if padded[index]:
                self._backward(padded[index], accumulator, measure=measure and is_sampled(item), last=index == final)
            accumulators.append(accumulator)
        # The other stages never call the loss.
        if self._mesh.is_last_stage:
            for accumulator, counted in zip(accumulators, counts, strict=True):
                accumulator.check_counts(counted)
        done = _OptimizerStep()

        def approve(squares: float) -> float:
            """Gather all ranks' losses and gradient norms in one message and check them; return the clipping factor."""
            reports: list[Report] = [(each.totals, each.faults, each.not_finite, each.largest) for each in accumulators]
            told = self._ranks.gather((squares, reports))
            # First: faults of a loss name its term and rows, and are the cause of a bad norm.
            done.add(self._mesh.one_per_dp_rank([report for _, report in told]))
            done.gradient_norm = math.sqrt(sum(of_rank for of_rank, _ in told))
            if not math.isfinite(done.gradient_norm):
                raise NotFiniteError(f"the gradient norm is {done.gradient_norm}")
            return self._clip_factor(done.gradient_norm)

        self._engine.step(lr, approve)
        return done

    def _backward(
        self, parts: Sequence[DataProto | None], accumulator: LossAccumulator, *, measure: bool, last: bool
    ) -> None:
        item, device = accumulator.item, self._ranks.device

        def finish(part: DataProto | None, outputs: dict[str, Tensor]) -> Tensor:
            if part is None:  # only another rank has rows: join its collectives with a loss of zero
                return torch.stack([value.sum() for value in outputs.values()]).sum() * 0.0
            out = _by_row(outputs, part, item)
            if measure:
                measure_logprob_diff(out, part, accumulator, device, version=self._engine.version)
            if is_corrected(item):
                out = correct(out, part, accumulator, device)
            return accumulator.add_terms(call_loss(item, out, part, device), part)

        self._engine.forward_backward(parts, forward_needs(item), finish, last=last)

    def _clip_factor(self, norm: float) -> float:
        limit = self._engine.engine_config.clip_grad
        return limit / norm if 0 < limit < norm else 1.0


class _OptimizerStep:
    """The result of one optimizer step over all ranks. `taken` False: it was not finite and was skipped."""

    def __init__(self, *, taken: bool = True) -> None:
        self.taken = taken
        self.totals: Totals = {}
        self.largest: dict[str, float] = {}
        self.gradient_norm = 0.0

    def add(self, ranks: Sequence[Sequence[Report]]) -> None:
        """Merge the reports of all data-parallel ranks. Raises DataError for the faults that they name."""
        reports = list(chain.from_iterable(ranks))
        faults = dict.fromkeys(chain.from_iterable(of_item for _, of_item, _, _ in reports))
        not_finite = dict.fromkeys(chain.from_iterable(of_item for _, _, of_item, _ in reports))
        if faults:
            raise DataError(f"{' | '.join(faults)}; the weights were left unchanged")
        if not_finite:
            raise NotFiniteError(" | ".join(not_finite))
        self.totals = merge_totals([totals for totals, _, _, _ in reports])
        for _, _, _, largest in reports:
            for name, value in largest.items():
                self.largest[name] = larger(self.largest.get(name, value), value)


def _global_counts(by_dp_rank: Sequence[Sequence[Counts]]) -> list[Counts]:
    """Add up each item's counts over the data-parallel ranks; terms keep the order of their first appearance."""
    summed: list[Counts] = []
    for of_item in zip(*by_dp_rank, strict=True):
        counts: Counts = {}
        for of_rank in of_item:
            for key, count in of_rank.items():
                counts[key] = counts.get(key, 0.0) + count
        summed.append(counts)
    return summed


def _by_row(outputs: dict[str, Tensor], part: DataProto, item: UpdateItem) -> Outputs:
    """Lay token-level outputs [tokens, ...] out as [rows, longest, ...], differentiably, zeros on the right."""
    lengths = part.view("responses").lengths
    rows, longest = len(lengths), int(lengths.max())
    row_of = torch.repeat_interleave(lengths)
    step = torch.arange(len(row_of)) - (lengths.cumsum(0) - lengths)[row_of]
    padded = dict(outputs)
    for name, values in outputs.items():
        if name != "scores":
            # One copy, where padding row by row would be two kernels for each row, and two in backward.
            places = (row_of * longest + step).to(values.device)
            empty = values.new_zeros(rows * longest, *values.shape[1:])
            padded[name] = empty.index_copy(0, places, values).view(rows, longest, *values.shape[1:])
    return Outputs(padded, item.numerics.log_ratio_bound)
