"""Packed sequences, end to end without padding, and the attention that separates them.

Every layer of a decoder except attention acts on single tokens, so the packed form [1, tokens, hidden] computes real
tokens only. A token never attends to later ones, so a prompt has the same hidden states in all rows that begin with it:
it is packed once, and the gradients of all its rows add up in it. Backends without a variable-length kernel get
queries, keys and values as [rows, longest], rows of similar length together. Padding is on the right, where causal
attention never looks, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.engines.torch.varlen import Segments

PACKED_ATTENTION = "rlcore_packed"
MULTIPLE = 64
"""Batches for kernels of variable length are filled up to a multiple of these tokens, which matrix products prefer."""


@dataclass(frozen=True)
class PaddedView:
    """A padded view [rows, longest] of packed rows. `tokens` int64 [rows * longest]: the packed token of each position.

    Positions after a row's end hold token 0; nothing reads their values.
    """

    tokens: Tensor
    rows: int
    longest: int

    def to_padded(self, values: Tensor) -> Tensor:
        """Return packed `values` [tokens, ...] as [rows, longest, ...]."""
        return values.index_select(0, self.tokens).view(self.rows, self.longest, *values.shape[1:])


@dataclass(frozen=True)
class Packing:
    """A packed batch, with the row and position of each token.

    `input_ids` int64 [tokens]. `positions` int64 [tokens], from 0 in each row. `lengths` int64 [rows]. Row i takes its
    first `shared[i]` tokens from row `owners[i]`; its own tokens start at token `starts[i]` (int64 [rows] each).
    `parts` are padded views that together contain all rows. Packed token j is at index `places[j]` of the views laid
    end to end. A packing for kernels of variable length has `segments` in place of views.
    """

    input_ids: Tensor
    positions: Tensor
    lengths: Tensor
    starts: Tensor
    shared: Tensor
    owners: Tensor
    parts: tuple[PaddedView, ...]
    places: Tensor
    segments: Segments | None = None

    @staticmethod
    def of(sequences: Sequence[Tensor], total: int = 0, prompts: Sequence[int] | None = None) -> Packing:
        """Pack int64 sequences, each [length] with length >= 1; fill up to `total` tokens with rows of zeros.

        `prompts`: the length of each row's prompt. With it, equal prompts are packed once, and rows of similar length
        share a padded view. Without it, all rows are one view.
        """
        shares_prefixes = prompts is not None
        heads = [0] * len(sequences) if prompts is None else list(map(min, prompts, map(len, sequences)))
        first: dict[bytes, int] = {}
        owners = [
            first.setdefault(row[:head].numpy().tobytes(), i) if head else i
            for i, (row, head) in enumerate(zip(sequences, heads, strict=True))
        ]
        shared = [0 if owner == i else head for i, (owner, head) in enumerate(zip(owners, heads, strict=True))]
        stored = [row[begin:] for row, begin in zip(sequences, shared, strict=True)]
        lengths = list(map(len, sequences))
        longest, missing = max(lengths), total - sum(map(len, stored))
        # Filling rows are no longer than the longest real one, so that they widen no padded view.
        for at in range(0, missing, longest):
            stored.append(torch.zeros(min(longest, missing - at), dtype=torch.int64))
            lengths.append(len(stored[-1]))
            owners.append(len(owners))
            shared.append(0)
        own = torch.tensor(list(map(len, stored)))
        packing = Packing(
            input_ids=torch.cat(stored),
            positions=torch.zeros(0),
            lengths=torch.tensor(lengths),
            starts=own.cumsum(0) - own,
            shared=torch.tensor(shared),
            owners=torch.tensor(owners),
            parts=(),
            places=torch.zeros(0),
        )
        return packing._laid_out(own, bucket_by_length(lengths) if shares_prefixes else [list(range(len(lengths)))])

    @staticmethod
    def in_segments(sequences: Sequence[Tensor], prompts: Sequence[int], total: int = 0) -> Packing:
        """Pack int64 sequences for kernels of variable length: distinct prompts first, then responses by prompt.

        `prompts`: the length of each row's prompt. Rows of zeros fill up to `total` tokens, or to a multiple of
        MULTIPLE. The rows of the packing are those of `sequences`, then the prompts.
        """
        heads = [max(1, min(pair)) for pair in zip(prompts, map(len, sequences), strict=True)]
        first: dict[bytes, int] = {}
        prompt_of = [
            first.setdefault(row[:head].numpy().tobytes(), len(first))
            for row, head in zip(sequences, heads, strict=True)
        ]
        rows, texts = len(sequences), [torch.frombuffer(bytearray(text), dtype=torch.int64) for text in first]
        order = sorted(range(rows), key=prompt_of.__getitem__)
        stored = [*texts, *(sequences[row][heads[row] :] for row in order)]
        begins = [*(0 for _ in texts), *(heads[row] for row in order)]
        used = sum(map(len, stored))
        longest, missing = max(map(len, stored)), max(total, -(-used // MULTIPLE) * MULTIPLE) - used
        for at in range(0, missing, longest):
            stored.append(torch.zeros(min(longest, missing - at), dtype=torch.int64))
            begins.append(0)
        own = torch.tensor(list(map(len, stored)))
        starts = own.cumsum(0) - own
        first_token = int(starts[len(texts)])  # of the responses
        place = torch.empty(rows, dtype=torch.int64)  # each row's response among the stored pieces
        place[torch.tensor(order)] = torch.arange(len(texts), len(texts) + rows)
        prompt = torch.tensor(prompt_of)
        # The filling belongs to the last prompt's responses, so that each token has keys.
        by_prompt = torch.zeros(len(texts), dtype=torch.int64).index_add_(0, prompt, own[place])
        by_prompt[-1] += missing
        sizes = [longest, max(1, int(by_prompt.max())), int(own[: len(texts)].max())]
        piece = torch.repeat_interleave(own)
        return Packing(
            input_ids=torch.cat(stored),
            positions=torch.arange(len(piece)) - starts[piece] + torch.tensor(begins)[piece],
            lengths=torch.cat([torch.tensor(list(map(len, sequences))), own[: len(texts)]]),
            starts=torch.cat([starts[place], starts[: len(texts)]]),
            shared=torch.cat([torch.tensor(heads), torch.zeros(len(texts), dtype=torch.int64)]),
            owners=torch.cat([rows + prompt, rows + torch.arange(len(texts))]),
            parts=(),
            places=torch.zeros(0),
            segments=Segments(
                _borders(own), _borders(by_prompt, first_token), _borders(own[: len(texts)]), torch.tensor(sizes)
            ),
        )

    def _laid_out(self, own: Tensor, groups: list[list[int]]) -> Packing:
        """Add positions, and a padded view for each group of rows. `own` int64 [rows]: the tokens stored for a row."""
        row_of = torch.repeat_interleave(own)
        positions = torch.arange(len(row_of)) - self.starts[row_of] + self.shared[row_of]
        base = torch.zeros_like(own)  # index of each row's first position in the views
        parts, at = [], 0
        for rows in map(torch.tensor, groups):
            longest = int(self.lengths[rows].max())
            base[rows] = at + torch.arange(len(rows)) * longest
            steps = torch.arange(longest)
            tokens = self.token(rows[:, None], steps).masked_fill(steps >= self.lengths[rows][:, None], 0)
            parts.append(PaddedView(tokens.flatten(), len(rows), longest))
            at += len(rows) * longest
        return replace(self, positions=positions, parts=tuple(parts), places=base[row_of] + positions)

    def token(self, rows: Tensor, steps: Tensor) -> Tensor:
        """Return the index, int64, of the packed token at `steps` of `rows` (int64, broadcast together)."""
        before = self.starts[self.owners[rows]] + steps
        return torch.where(steps < self.shared[rows], before, self.starts[rows] + steps - self.shared[rows])

    def to(self, device: torch.device) -> Packing:
        """Return the same packing on `device`."""
        names = self.__dataclass_fields__.keys() - {"parts", "segments"}
        moved = {name: getattr(self, name).to(device) for name in names}
        parts = tuple(PaddedView(part.tokens.to(device), part.rows, part.longest) for part in self.parts)
        return Packing(parts=parts, segments=self.segments and self.segments.to(device), **moved)

    def unpad(self, *padded: Tensor) -> Tensor:
        """Return the packed tokens [tokens, ...] of all padded views, [rows, longest, ...] each."""
        flat = [part.reshape(-1, *part.shape[2:]) for part in padded]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, self.places)

    def flash_kwargs(self) -> dict[str, Any]:
        """Return the arguments by which transformers hands variable lengths to flash attention kernels."""
        ends = F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": int(self.lengths.max()),
            "max_length_k": int(self.lengths.max()),
        }


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch, in the signature of transformers' attention functions.

    `query` [1, heads, tokens, head size], `key` and `value` [1, kv heads, tokens, head size]; returns
    [1, tokens, heads, head size]. Raises ValueError when the model does not pass `packing` on.
    """
    if packing is None:
        raise ValueError(f"{type(module).__name__} did not pass the packing to its attention function")
    by_token = [each[0].transpose(0, 1) for each in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    read = []
    for part in packing.parts:
        q, k, v = (part.to_padded(each).transpose(1, 2) for each in by_token)
        # Not every kernel accepts fewer key heads than query heads.
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=part.longest > 1)
        read.append(out.transpose(1, 2))
    return packing.unpad(*read)[None], None


def _borders(lengths: Tensor, start: int = 0) -> Tensor:
    """Return the borders, int32, of segments end to end; the last is repeated up to a power of two of borders."""
    ends = F.pad(lengths.cumsum(0), (1, 0)) + start
    missing = max(64, 1 << (len(ends) - 1).bit_length()) - len(ends)
    return torch.cat([ends, ends[-1:].expand(missing)]).to(torch.int32)


def bucket_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows of similar length, longest first.

    A row has at least half the length of its group's longest row, unless that has at most 32 tokens.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not groups or 2 * max(lengths[row], 16) < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def register_packed_attention() -> Callable[..., Any]:
    """Register `rlcore_packed` with transformers and return the function. May be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return packed_attention
