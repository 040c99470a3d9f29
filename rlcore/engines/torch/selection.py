"""Rows of a batch as the model reads them: packed tokens, and which positions answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.engines.torch.packing import Packing
from rlcore.protocol import DataProto


@dataclass(frozen=True)
class Selection:
    """A micro-batch for PackedModel.forward.

    `select` int64 [selected] are indices into the packed tokens: those that predict the response tokens `labels`, or,
    where `at_end`, the last token of each row.
    """

    packing: Packing
    select: Tensor
    labels: Tensor

    @staticmethod
    def of(batch: DataProto | None, *, at_end: bool, folded: bool, device: torch.device, total: int = 0) -> Selection:
        """Pack the rows' prompts and responses, `folded` as Packing does with prompts, filled up to `total` tokens.

        None stands for a rank without rows, which still has to take part in the collectives: zeros, one output.
        """
        rows = row_tokens(batch, at_end=at_end)
        if batch is None:
            packing = Packing.of(rows, total)
            select = labels = torch.zeros(1, dtype=torch.int64)
            return Selection(packing.to(device), select.to(device), labels.to(device))
        prompts, lengths = batch.view("prompts").lengths, batch.view("responses").lengths
        packing = Packing.of(rows, total, prompts.tolist() if folded else None)
        if at_end:
            select = packing.token(torch.arange(len(rows)), prompts + lengths - 1)
        else:
            # Before the first token of the response stands the prompt's last, which predicts it.
            row_of = torch.repeat_interleave(lengths)
            steps = torch.arange(len(row_of)) - (lengths.cumsum(0) - lengths)[row_of]
            select = packing.token(row_of, prompts[row_of] - 1 + steps)
        return Selection(packing.to(device), select.to(device), batch.view("responses").values.to(device))


def row_tokens(batch: DataProto | None, *, at_end: bool) -> list[Tensor]:
    """Return the tokens of each row that the model reads, int64 [length].

    Unless its last token is asked for, a row ends before it, as it predicts nothing; an empty response leaves a prompt
    of which nothing is selected.
    """
    if batch is None:
        return [torch.zeros(1, dtype=torch.int64)]
    rows = zip(batch.view("prompts").to_list(), batch.view("responses").to_list(), strict=True)
    if at_end:
        return [torch.cat(row) for row in rows]
    return [torch.cat([p, r])[: max(1, len(p) + len(r) - 1)] for p, r in rows]


def total_tokens(parts: Sequence[DataProto | None], *, at_end: bool, folded: bool) -> int:
    """Return how many tokens the largest micro-batch has."""
    cpu = torch.device("cpu")
    selections = [Selection.of(part, at_end=at_end, folded=folded, device=cpu) for part in parts]
    return max(len(each.packing.input_ids) for each in selections)
