"""Decoding in slots: a step whose shapes never change, so that a GPU can replay it without the host.

A row holds a slot from its admission to its end. Every slot has `width` places for keys and values, its own position,
its own noise, and its own room for tokens; all of it is in fixed buffers on the device. A step feeds each slot's newest
token, draws the next one, writes it down, and marks the rows that ended: nothing in it waits for the host or depends on
which rows are alive. On a GPU it is captured as a CUDA graph, once for each number of rows (a power of two), and the
host looks only every few steps at what ended. Rows move together into fewer slots as they become fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.engine.sampling import sample_tokens


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer's tensors: the norms' weights, and weight and bias of its products."""

    before: Tensor
    qkv: list[Tensor]
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: list[Tensor]
    between: Tensor
    gate_up: list[Tensor]
    down: list[Tensor]


@dataclass(frozen=True)
class Heads:
    """How a product's outputs divide into query, key and value heads."""

    queries: int
    keys: int
    size: int
    scale: float
    eps: float


def attention_inputs(
    hidden: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, heads: Heads, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, [rows, their heads, head size] each, of the residual stream [rows, hidden]."""
    inputs = F.rms_norm(hidden, layer.before.shape, layer.before.to(hidden.dtype), heads.eps).to(dtype)
    states = F.linear(inputs, *layer.qkv).view(len(hidden), -1, heads.size)
    rotated, values = states[:, : heads.queries + heads.keys], states[:, heads.queries + heads.keys :]
    if layer.query_norm is not None and layer.key_norm is not None:
        queries = F.rms_norm(rotated[:, : heads.queries], layer.query_norm.shape, layer.query_norm.to(dtype), heads.eps)
        keys = F.rms_norm(rotated[:, heads.queries :], layer.key_norm.shape, layer.key_norm.to(dtype), heads.eps)
        rotated = torch.cat([queries, keys], dim=1)
    rotated = torch.addcmul(rotated * cos, rotated.roll(heads.size // 2, -1), sin).to(dtype)
    return rotated[:, : heads.queries], rotated[:, heads.queries :], values


def after_attention(
    hidden: Tensor, read: Tensor, layer: LayerWeights, activation: Callable[[Tensor], Tensor], heads: Heads
) -> Tensor:
    """Return the residual stream after the layer, from what its attention read [rows, query heads, head size]."""
    hidden = hidden + F.linear(read.reshape(len(hidden), -1), *layer.out)
    inputs = F.rms_norm(hidden, layer.between.shape, layer.between.to(hidden.dtype), heads.eps).to(read.dtype)
    gate, up = F.linear(inputs, *layer.gate_up).chunk(2, -1)
    return hidden + F.linear(activation(gate) * up, *layer.down)


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return what queries [rows, heads, size] read from `keys` and `values` [rows, width, key heads, size] so far."""
    rows, width, key_heads, size = keys.shape
    seen = torch.arange(width, device=q.device) <= positions[:, None]
    mask = torch.zeros(rows, width, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    grouped = q.reshape(rows, key_heads, -1, size)
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None, None], scale=scale
    )
    return out.reshape(q.shape)


def attend_lengths(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return the same by the flash kernel for variable lengths, which reads of each row what it has; bf16 and fp16."""
    rows, width, key_heads, size = keys.shape
    starts = torch.arange(rows + 1, device=q.device, dtype=torch.int32)
    out = torch.ops.aten._flash_attention_forward(
        q,
        keys.view(-1, key_heads, size),
        values.view(-1, key_heads, size),
        starts,
        starts * width,
        1,
        width,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=(positions + 1).to(torch.int32),
    )
    return out[0]


def draw_plain(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw as `sample_tokens` does without cuts, in two passes over the logits [rows, vocab]: by block, then within it.

    The sums are taken in another order, so at the very edge between two tokens it may choose the other one.
    """
    rows, vocabulary = logits.shape
    block = next((size for size in (256, 128, 64, 32, 16) if vocabulary % size == 0), 1)
    blocks = logits.view(rows, -1, block)
    high = logits.amax(-1, keepdim=True).float()
    masses = ((blocks.float() - high[:, :, None]) / temperature).exp().sum(-1)
    ends = masses.cumsum(-1)
    draw = noise.float()[:, None] * ends[:, -1:]
    chosen = torch.searchsorted(ends, draw, right=True).clamp(max=masses.shape[1] - 1)
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, 1, block)).squeeze(1).float()
    scaled = (inside - high) / temperature
    start = (ends - masses).gather(1, chosen)
    steps = scaled.exp().cumsum(-1)
    at = torch.searchsorted(steps, draw - start, right=True).clamp(max=block - 1)
    tokens = (chosen * block + at).squeeze(-1)
    return tokens, (scaled.gather(1, at) - ends[:, -1:].log()).squeeze(-1)


class Slots:
    """The buffers of all rows, on one device. Rows that decode are in the first slots."""

    def __init__(self, slots: int, width: int, room: int, layers: int, heads: Heads, dtype: torch.dtype, device: Any):
        self.slots, self.width, self.room = slots, width, room
        self.cache = torch.zeros(layers, 2, slots, width, heads.keys, heads.size, dtype=dtype, device=device)
        ints = {name: torch.zeros(slots, dtype=torch.int64, device=device) for name in self.INTS}
        self.tokens, self.positions, self.count, self.limit, self.may_end = ints.values()
        self.ended = torch.ones(slots, dtype=torch.bool, device=device)
        self.by_itself = torch.zeros(slots, dtype=torch.bool, device=device)
        self.noise = torch.zeros(slots, room, dtype=torch.float64, device=device)
        # The last column takes what ended rows would write.
        self.drawn = torch.zeros(slots, room + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(slots, room + 1, device=device)

    INTS = ("tokens", "positions", "count", "limit", "may_end")
    BY_ROW = (*INTS, "ended", "by_itself", "noise", "drawn", "log_probs")

    def move(self, holes: Tensor, fillers: Tensor) -> None:
        """Copy the rows in slots `fillers` to slots `holes`, int64 of one length."""
        self.cache[:, :, holes] = self.cache[:, :, fillers]
        for name in self.BY_ROW:
            values = getattr(self, name)
            values[holes] = values[fillers]


class StaticStep:
    """One token of each of the first `rows` slots."""

    def __init__(
        self,
        slots: Slots,
        layers: Sequence[LayerWeights],
        embedding: Tensor,
        norm: Tensor,
        head: list[Tensor],
        rotary: tuple[Tensor, Tensor],
        heads: Heads,
        activation: Callable[[Tensor], Tensor],
        end_ids: Tensor,
        *,
        attend: Callable[..., Tensor] = attend_masked,
    ) -> None:
        self.slots, self.layers, self.embedding, self.norm, self.head = slots, layers, embedding, norm, head
        self.cos, self.sin = rotary
        self.heads, self.activation, self.end_ids, self.attend = heads, activation, end_ids, attend
        self.inputs, self.outputs = attention_inputs, after_attention
        self.dtype = slots.cache.dtype

    def logits(self, rows: int) -> Tensor:
        """Feed the newest tokens of the first `rows` slots and return the next tokens' logits [rows, vocab]."""
        slots = self.slots
        positions = slots.positions[:rows]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        places = torch.arange(rows, device=positions.device) * slots.width + positions
        hidden = F.embedding(slots.tokens[:rows], self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = self.inputs(hidden, layer, cos, sin, self.heads, self.dtype)
            keys, values = slots.cache[index, 0, :rows], slots.cache[index, 1, :rows]
            keys.view(-1, *k.shape[1:]).index_copy_(0, places, k)
            values.view(-1, *v.shape[1:]).index_copy_(0, places, v)
            read = self.attend(q, keys, values, positions, self.heads.scale)
            hidden = self.outputs(hidden, read, layer, self.activation, self.heads)
        return F.linear(F.rms_norm(hidden, self.norm.shape, self.norm.to(hidden.dtype), self.heads.eps).to(self.dtype), *self.head)

    def take(self, rows: int, tokens: Tensor, log_probs: Tensor) -> None:
        """Write down the tokens int64 [rows] that were drawn, and which rows end with them."""
        s = self.slots
        live = ~s.ended[:rows]
        column = torch.where(live, s.count[:rows], s.room)[:, None]
        s.drawn[:rows].scatter_(1, column, tokens[:, None])
        s.log_probs[:rows].scatter_(1, column, log_probs[:, None])
        s.tokens[:rows].copy_(torch.where(live, tokens, s.tokens[:rows]))
        s.count[:rows].add_(live)
        s.positions[:rows].add_(live)
        ends = live & (tokens[:, None] == self.end_ids).any(-1)
        s.by_itself[:rows].logical_or_(ends)
        s.ended[:rows].logical_or_(ends | (live & (s.count[:rows] >= s.limit[:rows])))

    def __call__(self, rows: int, draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        """Decode the first `rows` slots by one token; `draw` takes logits and noise [rows]."""
        s = self.slots
        logits = self.logits(rows)
        noise = s.noise[:rows].gather(1, s.count[:rows].clamp(max=s.room - 1)[:, None]).squeeze(1)
        self.take(rows, *draw(logits, noise))
