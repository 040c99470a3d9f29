"""A decoding step with constant shapes, so that a GPU can replay it without the host.

Each row has a slot: `width` columns for keys and values, its own position and its own room for tokens, in fixed buffers
on the device. A step feeds each slot's newest token, draws the next one, stores it, and marks the rows that ended. It
never waits for the host, and no shape depends on the set of live rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcore.engines.hf.fused_decode import linear_groups

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From logits [rows, vocab] and noise [rows] to tokens int64 [rows] and their log-probs fp32 [rows]."""


@dataclass(frozen=True)
class Heads:
    """The division of a layer's first product into query, key and value heads of one `size`."""

    queries: int
    keys: int
    size: int
    scale: float
    eps: float

    @staticmethod
    def of(layer: Any) -> Heads:
        """Read the numbers from a decoder layer of LAYERS."""
        attention = layer.self_attn
        size = attention.head_dim
        projections = (attention.q_proj, attention.k_proj)
        queries, keys = (each.out_features // size for each in projections)
        return Heads(queries, keys, size, attention.scaling, layer.input_layernorm.variance_epsilon)


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer's tensors: norms, and weight and bias of its four products."""

    before: Tensor
    qkv: list[Tensor]
    head_norms: list[Tensor]
    out: list[Tensor]
    between: Tensor
    gate_up: list[Tensor]
    down: list[Tensor]


class StepWeights:
    """Copies of a module's weights in the form of a step, at constant addresses; `refresh` updates them."""

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        base = getattr(hf, hf.base_model_prefix)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.dtype, self.heads = dtype, Heads.of(base.layers[0])
        self.activation: Callable[[Tensor], Tensor] = base.layers[0].mlp.act_fn
        self.embedding = self._kept(base.embed_tokens.weight)
        self.layers = [self._layer(layer) for layer in base.layers]
        self.norm = self._kept(base.norm.weight)
        self.head = self._fused([hf.get_output_embeddings()])

    def _layer(self, layer: Any) -> LayerWeights:
        qkv, out, gate_up, down = (self._fused(modules) for modules in linear_groups(layer))
        names = ("q_norm", "k_norm")
        head_norms = [
            self._kept(getattr(layer.self_attn, name).weight) for name in names if hasattr(layer.self_attn, name)
        ]
        before, between = (self._kept(norm.weight) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        return LayerWeights(before, qkv, head_norms, out, between, gate_up, down)

    def _fused(self, modules: Sequence[nn.Linear]) -> list[Tensor]:
        """Return weight, and bias if there is one, of linear layers with the same input, fused into one layer."""
        weights: list[Tensor] = [module.weight for module in modules]
        biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
        return [self._copy(each) for each in (weights, biases) if each]

    def _kept(self, parameter: Tensor) -> Tensor:
        return self._copy([parameter], parameter.dtype)

    def _copy(self, parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        first = parameters[0]
        whole = first.new_empty((sum(map(len, parameters)), *first.shape[1:]), dtype=dtype or self.dtype)
        parts = whole.split([len(parameter) for parameter in parameters])
        self._copies += zip(parts, parameters, strict=True)
        return whole

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current parameters."""
        for copy, parameter in self._copies:
            copy.copy_(parameter)


def into_layer(
    hidden: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, heads: Heads, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a layer's queries [rows, query heads, size], and keys and values [rows, 2, key heads, size].

    `hidden` [rows, hidden] is the residual stream; `cos` and `sin` [rows, 1, size].
    """
    inputs = _norm(hidden, layer.before, heads).to(dtype)
    states = F.linear(inputs, *layer.qkv).view(len(hidden), -1, heads.size)
    rotated, values = states[:, : heads.queries + heads.keys], states[:, heads.queries + heads.keys :]
    if layer.head_norms:
        parts = zip(rotated.split([heads.queries, heads.keys], 1), layer.head_norms, strict=True)
        rotated = torch.cat([_norm(states, weight, heads) for states, weight in parts], dim=1)
    rotated = torch.addcmul(rotated * cos, rotated.roll(heads.size // 2, -1), sin).to(dtype)
    queries, keys = rotated.split([heads.queries, heads.keys], 1)
    return queries.contiguous(), torch.stack([keys, values], dim=1)


def out_of_layer(hidden: Tensor, read: Tensor, layer: LayerWeights, activation: Any, heads: Heads) -> Tensor:
    """Return the residual stream after the layer; `read` [rows, query heads, size] is its attention's output."""
    hidden = hidden + F.linear(read.reshape(len(hidden), -1), *layer.out)
    gate, up = F.linear(_norm(hidden, layer.between, heads).to(read.dtype), *layer.gate_up).chunk(2, -1)
    return hidden + F.linear(activation(gate) * up, *layer.down)


def between_layers(
    hidden: Tensor,
    read: Tensor,
    layer: LayerWeights,
    following: LayerWeights,
    cos: Tensor,
    sin: Tensor,
    activation: Any,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residual stream after `layer`, and the results of `into_layer` for the `following` layer."""
    hidden = out_of_layer(hidden, read, layer, activation, heads)
    return hidden, *into_layer(hidden, following, cos, sin, heads, read.dtype)


def _norm(values: Tensor, weight: Tensor, heads: Heads) -> Tensor:
    return F.rms_norm(values, weight.shape, weight.to(values.dtype), heads.eps)


Attend = Callable[[Tensor, Tensor], Tensor]
"""Attention of queries [rows, query heads, size] over a layer's cache [rows, width, 2, key heads, size]."""


def masked_attention(positions: Tensor, width: int, heads: Heads, dtype: torch.dtype) -> Attend:
    """Return attention over the full width, with a mask, for rows at `positions` int64 [rows]."""
    seen = torch.arange(width, device=positions.device) <= positions[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill(~seen, float("-inf"))

    def attend(queries: Tensor, cache: Tensor) -> Tensor:
        keys, values = cache.permute(2, 0, 3, 1, 4)
        grouped = queries.view(len(queries), heads.keys, -1, heads.size)
        read = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=heads.scale)
        return read.reshape(queries.shape)  # not `view`: CUDA kernels return another memory order

    return attend


def flash_attention(positions: Tensor, width: int, heads: Heads, dtype: torch.dtype) -> Attend:
    """Return the same attention by the flash kernel, which reads filled columns only; for bf16 on CUDA."""
    starts = torch.arange(len(positions) + 1, device=positions.device, dtype=torch.int32)
    filled, places = (positions + 1).to(torch.int32), starts * width

    def attend(queries: Tensor, cache: Tensor) -> Tensor:
        keys, values = cache.flatten(0, 1).unbind(1)
        found = torch.ops.aten._flash_attention_forward(
            queries,
            keys,
            values,
            starts,
            places,
            1,
            width,
            0.0,
            False,
            False,
            scale=heads.scale,
            seqused_k=filled,
        )
        return found[0]

    return attend


def draw_in_blocks(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw as `sample_tokens` does without top-k and top-p, in two passes: first a block of tokens, then one of them.

    The sums have another order, so noise at the very border between two tokens may give the other token.
    """
    rows, vocabulary = logits.shape
    size = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if vocabulary % size == 0)
    blocks = logits.view(rows, -1, size)
    high = logits.amax(-1, keepdim=True).float()
    masses = ((blocks.float() - high[:, :, None]) / temperature).exp().sum(-1)
    ends = masses.cumsum(-1)
    # Keeps the draw below the last sum after rounding: no token lies beyond it.
    under = 1 - 2**-23
    draw = torch.minimum(noise.float()[:, None] * ends[:, -1:], ends[:, -1:] * under)
    block = torch.searchsorted(ends, draw, right=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, size)).squeeze(1).float()
    scaled = (inside - high) / temperature
    sums = scaled.exp().cumsum(-1)
    draw = torch.minimum(draw - (ends - masses).gather(1, block), sums[:, -1:] * under)
    token = torch.searchsorted(sums, draw, right=True)
    log_probs = scaled.gather(1, token) - ends[:, -1:].log()
    return (block * size + token).squeeze(-1), log_probs.squeeze(-1)


class Slots:
    """The buffers of all rows, on one device. The decoding rows have the first slots.

    `tokens` int64 [slots] are the newest tokens, at `positions`. `count` is the number of drawn tokens, `limit` its
    maximum, and `may_end` its minimum. `drawn` and `log_probs` are [slots, room + 1]: ended rows write to the last
    column, which is never read.
    """

    INTEGERS = ("tokens", "positions", "count", "limit", "may_end")
    BY_ROW = (*INTEGERS, "ended", "by_itself", "noise", "drawn", "log_probs")
    tokens: Tensor
    positions: Tensor
    count: Tensor
    limit: Tensor
    may_end: Tensor

    def __init__(self, slots: int, width: int, room: int, weights: StepWeights, device: torch.device) -> None:
        self.slots, self.width, self.room = slots, width, room
        heads, layers = weights.heads, len(weights.layers)
        shape = (layers, slots, width, 2, heads.keys, heads.size)
        self.cache = torch.zeros(shape, dtype=weights.dtype, device=device)
        for name in self.INTEGERS:
            setattr(self, name, torch.zeros(slots, dtype=torch.int64, device=device))
        self.ended = torch.ones(slots, dtype=torch.bool, device=device)
        self.by_itself = torch.zeros(slots, dtype=torch.bool, device=device)
        self.noise = torch.zeros(slots, room, dtype=torch.float64, device=device)
        self.drawn = torch.zeros(slots, room + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(slots, room + 1, device=device)

    @staticmethod
    def bytes_of_one(width: int, room: int, weights: StepWeights) -> int:
        """Return the memory of one slot, in bytes."""
        heads = weights.heads
        return len(weights.layers) * width * 2 * heads.keys * heads.size * weights.dtype.itemsize + room * 20

    def move(self, holes: Tensor, fillers: Tensor) -> None:
        """Copy the rows in slots `fillers` to slots `holes`, int64, equally many."""
        self.cache[:, holes] = self.cache[:, fillers]
        for name in self.BY_ROW:
            values = getattr(self, name)
            values[holes] = values[fillers]


class StaticStep:
    """Decodes one more token for each of the first slots, on fixed buffers.

    `rotary`: cosines and sines [width, size] of `rotary_tables`. `attention`: masked_attention or flash_attention.
    """

    def __init__(
        self,
        slots: Slots,
        weights: StepWeights,
        rotary: tuple[Tensor, Tensor],
        end_ids: Tensor,
        attention: Callable[[Tensor, int, Heads, torch.dtype], Attend],
        *,
        compiled: bool,
    ) -> None:
        self.slots, self.weights, self.end_ids, self.attention = slots, weights, end_ids, attention
        self.cos, self.sin = rotary
        self.into, self.between, self.out_of = into_layer, between_layers, out_of_layer
        if compiled:
            self.into, self.between = torch.compile(into_layer), torch.compile(between_layers)
            self.out_of = torch.compile(out_of_layer)

    def logits(self, rows: int) -> Tensor:
        """Feed the newest tokens of the first `rows` slots and return the next tokens' logits [rows, vocab]."""
        slots, weights = self.slots, self.weights
        layers, heads, activation = weights.layers, weights.heads, weights.activation
        positions = slots.positions[:rows]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        places = torch.arange(rows, device=positions.device) * slots.width + positions
        attend = self.attention(positions, slots.width, heads, weights.dtype)
        hidden = F.embedding(slots.tokens[:rows], weights.embedding)
        queries, new = self.into(hidden, layers[0], cos, sin, heads, weights.dtype)
        for index, layer in enumerate(layers):
            cache = slots.cache[index, :rows]
            cache.flatten(0, 1).index_copy_(0, places, new)
            read = attend(queries, cache)
            if index + 1 == len(layers):
                hidden = self.out_of(hidden, read, layer, activation, heads)
            else:
                following = layers[index + 1]
                hidden, queries, new = self.between(hidden, read, layer, following, cos, sin, activation, heads)
        return F.linear(_norm(hidden, weights.norm, heads).to(weights.dtype), *weights.head)

    def store(self, first: int, tokens: Tensor, log_probs: Tensor) -> None:
        """Store a drawn token for each of the slots from `first` on, and mark the rows that end with it."""
        s = self.slots
        part = slice(first, first + len(tokens))
        # Ended rows run along: a graph has no branches. They write to the spare column and change nothing else.
        live = ~s.ended[part]
        column = torch.where(live, s.count[part], s.room)[:, None]
        s.drawn[part].scatter_(1, column, tokens[:, None])
        s.log_probs[part].scatter_(1, column, log_probs[:, None])
        s.tokens[part].copy_(torch.where(live, tokens, s.tokens[part]))
        s.count[part].add_(live)
        s.positions[part].add_(live)
        ends = live & (tokens[:, None] == self.end_ids).any(-1)
        s.by_itself[part].logical_or_(ends)
        s.ended[part].logical_or_(ends | (live & (s.count[part] >= s.limit[part])))

    def draw(self, first: int, logits: Tensor, draw: Draw, *, bans: bool) -> None:
        """Draw and store the next token of the slots from `first` on; `bans` enforces `may_end`."""
        s = self.slots
        part = slice(first, first + len(logits))
        if bans:
            banned = (s.count[part] < s.may_end[part])[:, None]
            ends = logits[:, self.end_ids].masked_fill(banned, float("-inf"))
            logits = logits.index_copy(1, self.end_ids, ends)
        # Ended rows may be past the last number; their draw is not used.
        number = s.count[part].clamp(max=s.room - 1)[:, None]
        noise = s.noise[part].gather(1, number).squeeze(1)
        self.store(first, *draw(logits, noise))

    def __call__(self, rows: int, draw: Draw, *, bans: bool) -> None:
        """Decode the first `rows` slots by one token."""
        self.draw(0, self.logits(rows), draw, bans=bans)
