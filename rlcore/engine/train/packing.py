"""Sequences laid end to end, without padding, and the attention that keeps them apart.

Every layer of a decoder but attention acts on each token alone, so the packed form [1, tokens, hidden] costs exactly
the tokens that exist. For attention on backends without a variable-length kernel, queries, keys and values are laid out
[rows, longest] just there: padding stands on the right, where a causal row never looks, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ATTENTION = "rlcore_packed"


@dataclass(frozen=True)
class Packing:
    """Where each token of a packed batch belongs.

    `input_ids` int64 [tokens]; `lengths` int64 [rows]; `positions` int64 [tokens], from 0 in each row; `slots` int64
    [tokens], each token's place in a [rows * longest] layout.
    """

    input_ids: Tensor
    lengths: Tensor
    positions: Tensor
    slots: Tensor
    rows: int
    longest: int

    @staticmethod
    def of(sequences: list[Tensor], total: int = 0) -> Packing:
        """Pack int64 sequences, each [length] with length >= 1; filled up to `total` tokens with rows of zeros."""
        longest, missing = max(map(len, sequences)), total - sum(map(len, sequences))
        filler = [torch.zeros(min(longest, missing - at), dtype=torch.int64) for at in range(0, missing, longest)]
        sequences = [*sequences, *filler]
        lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64)
        longest = int(lengths.max())
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        slots = torch.repeat_interleave(torch.arange(len(sequences)) * longest, lengths) + positions
        return Packing(torch.cat(sequences), lengths, positions, slots, len(sequences), longest)

    def to(self, device: torch.device) -> Packing:
        """Return the same packing on `device`."""
        return Packing(
            self.input_ids.to(device),
            self.lengths.to(device),
            self.positions.to(device),
            self.slots.to(device),
            self.rows,
            self.longest,
        )

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """Lay out packed `values` [tokens, ...] as [rows, longest, ...], `fill` on the right."""
        out = values.new_full((self.rows * self.longest, *values.shape[1:]), fill)
        return out.index_copy(0, self.slots, values).view(self.rows, self.longest, *values.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Take the tokens [tokens, ...] back out of [rows, longest, ...]."""
        return padded.reshape(self.rows * self.longest, *padded.shape[2:]).index_select(0, self.slots)

    def flash_kwargs(self) -> dict[str, Any]:
        """Return the arguments by which transformers hands variable lengths to flash attention kernels."""
        ends = F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
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
    [1, tokens, heads, head size]. Raises ValueError when the model does not hand on `packing`.
    """
    if packing is None:
        raise ValueError(f"{type(module).__name__} did not hand the packing on to its attention function")
    q, k, v = (packing.pad(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=packing.longest > 1)
    return packing.unpad(out.transpose(1, 2))[None], None


def register_packed_attention() -> Callable[..., Any]:
    """Make `rlcore_packed` known to transformers (doing so again changes nothing) and return the function."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return packed_attention
