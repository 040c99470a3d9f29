"""Turns the rows of a batch into model input: packed tokens, and the positions of the needed outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.engines.torch.packing import Packing
from rlcore.protocol import DataProto

Pack = Callable[[Sequence[Tensor], Sequence[int], int], Packing]
"""From rows, the lengths of their prompts and a number of tokens to fill up to, to a packing; see PackedModel.pack."""


@dataclass(frozen=True)
class Selection:
    """A micro-batch for PackedModel.forward.

    `select` int64 [selected] are indices into the packed tokens: the tokens that predict the response tokens `labels`,
    or, with `at_end`, the last token of each row.
    """

    packing: Packing
    select: Tensor
    labels: Tensor

    @staticmethod
    def of(batch: DataProto | None, *, at_end: bool, pack: Pack, device: torch.device, total: int = 0) -> Selection:
        """Pack the rows' prompts and responses, filled up to `total` tokens.

        None gives a rank without rows one token and one output, so that it can join the collectives.
        """
        rows = row_tokens(batch, at_end=at_end)
        if batch is None:
            packing = pack(rows, [1], total)
            select = labels = torch.zeros(1, dtype=torch.int64)
            return Selection(packing.to(device), select.to(device), labels.to(device))
        prompts, lengths = batch.view("prompts").lengths, batch.view("responses").lengths
        packing = pack(rows, prompts.tolist(), total)
        if at_end:
            select = packing.token(torch.arange(len(rows)), prompts + lengths - 1)
        else:
            # Each token is predicted at the position before it; the prompt's last token predicts the first one.
            row_of = torch.repeat_interleave(lengths)
            steps = torch.arange(len(row_of)) - (lengths.cumsum(0) - lengths)[row_of]
            select = packing.token(row_of, prompts[row_of] - 1 + steps)
        return Selection(packing.to(device), select.to(device), batch.view("responses").values.to(device))


def row_tokens(batch: DataProto | None, *, at_end: bool) -> list[Tensor]:
    """Return each row's input tokens, int64 [length].

    Without `at_end` the last token is left out, as it predicts nothing. A row with an empty response keeps its prompt,
    and none of its positions is selected.
    """
    if batch is None:
        return [torch.zeros(1, dtype=torch.int64)]
    rows = zip(batch.view("prompts").to_list(), batch.view("responses").to_list(), strict=True)
    whole = [torch.cat(row) for row in rows]
    if at_end:
        return whole
    return [tokens[: max(1, len(tokens) - 1)] for tokens in whole]


def total_tokens(parts: Sequence[DataProto | None], *, at_end: bool, pack: Pack) -> int:
    """Return the number of tokens of the largest micro-batch."""
    cpu = torch.device("cpu")
    selections = [Selection.of(part, at_end=at_end, pack=pack, device=cpu) for part in parts]
    return max(len(each.packing.input_ids) for each in selections)
