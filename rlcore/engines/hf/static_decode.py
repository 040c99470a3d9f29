"""A decoding step with constant shapes, so that a GPU can replay it without the host.

Each row has a slot: `width` columns for keys and values, its own position and its own room for tokens, in fixed buffers
on the device. A step feeds each slot's newest token, draws the next one, stores it, and marks the rows that ended. It
never waits for the host, and no shape depends on the set of live rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcore.engine.sampling import block_size, draw_from_blocks
from rlcore.engines.hf.fused_decode import adjacent, linear_groups

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
    """A module's weights in the form of a step, at constant addresses; `refresh` updates them.

    They are the module's own tensors where these have the right dtype, and lie side by side in memory where several are
    one product; elsewhere they are copies.
    """

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
        first, dtype = parameters[0], dtype or self.dtype
        whole = adjacent([each.detach() for each in parameters]) if first.dtype is dtype else None
        if whole is None:
            whole = first.new_empty((sum(map(len, parameters)), *first.shape[1:]), dtype=dtype)
        parts = whole.split([len(parameter) for parameter in parameters])
        self._copies += zip(parts, parameters, strict=True)
        return whole

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current parameters, but for those that are used in place."""
        for copy, parameter in self._copies:
            if copy.data_ptr() != parameter.data_ptr():
                copy.copy_(parameter)


def into_layer(
    hidden: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, heads: Heads, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a layer's queries and keys, rotated, [rows, query heads + key heads, size], and its values.

    The values are [rows, key heads, size]. `hidden` [rows, hidden] is the residual stream; `cos` and `sin` [rows, 1,
    size].
    """
    inputs = _norm(hidden, layer.before, heads).to(dtype)
    states = F.linear(inputs, *layer.qkv).view(len(hidden), -1, heads.size)
    rotated, values = states[:, : heads.queries + heads.keys], states[:, heads.queries + heads.keys :]
    if layer.head_norms:
        parts = zip(rotated.split([heads.queries, heads.keys], 1), layer.head_norms, strict=True)
        rotated = torch.cat([_norm(states, weight, heads) for states, weight in parts], dim=1)
    return torch.addcmul(rotated * cos, rotated.roll(heads.size // 2, -1), sin).to(dtype), values


def out_of_layer(hidden: Tensor, read: Tensor, layer: LayerWeights, activation: Any, heads: Heads) -> Tensor:
    """Return the residual stream after the layer; `read` [rows, query heads, size] is its attention's output."""
    hidden = hidden + F.linear(read.reshape(len(hidden), -1), *layer.out)
    gate, up = F.linear(_norm(hidden, layer.between, heads).to(read.dtype), *layer.gate_up).chunk(2, -1)
    return hidden + F.linear(activation(gate) * up, *layer.down)


def first_layer(
    tokens: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], weights: StepWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the residual stream, the rows' cosines and sines, and the results of `into_layer` for the first layer."""
    cos, sin = (table[positions][:, None] for table in rotary)
    hidden = F.embedding(tokens, weights.embedding).float()
    return hidden, cos, sin, *into_layer(hidden, weights.layers[0], cos, sin, weights.heads, weights.dtype)


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


def last_layer(hidden: Tensor, read: Tensor, weights: StepWeights) -> Tensor:
    """Return the inputs of the head [rows, hidden]: the residual stream after the last layer, normed."""
    hidden = out_of_layer(hidden, read, weights.layers[-1], weights.activation, weights.heads)
    return _norm(hidden, weights.norm, weights.heads).to(weights.dtype)


def _norm(values: Tensor, weight: Tensor, heads: Heads) -> Tensor:
    return F.rms_norm(values, weight.shape, weight.to(values.dtype), heads.eps)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Store the new keys and values in a layer's cache [rows, width, 2, key heads, size]; return the attention over it.

Reads the results of `into_layer`. The attention is [rows, query heads, size].
"""


def stored_at(positions: Tensor, width: int, heads: Heads) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function that stores new keys and values at `positions` int64 [rows], and returns the queries."""
    places = torch.arange(len(positions), device=positions.device) * width + positions

    def store(rotated: Tensor, values: Tensor, cache: Tensor) -> Tensor:
        queries, keys = rotated.split([heads.queries, heads.keys], 1)
        cache.flatten(0, 1).index_copy_(0, places, torch.stack([keys, values], dim=1))
        return queries

    return store


def masked_attention(positions: Tensor, width: int, heads: Heads, dtype: torch.dtype) -> Attend:
    """Return attention over the full width, with a mask, for rows at `positions` int64 [rows]."""
    seen = torch.arange(width, device=positions.device) <= positions[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill(~seen, float("-inf"))
    store = stored_at(positions, width, heads)

    def attend(rotated: Tensor, values: Tensor, cache: Tensor) -> Tensor:
        queries = store(rotated, values, cache)
        all_keys, all_values = cache.permute(2, 0, 3, 1, 4)
        grouped = queries.reshape(len(queries), heads.keys, -1, heads.size)
        read = F.scaled_dot_product_attention(
            grouped, all_keys, all_values, attn_mask=mask[:, None, None], scale=heads.scale
        )
        return read.reshape(queries.shape)  # not `view`: CUDA kernels return another memory order

    return attend


def flash_attention(positions: Tensor, width: int, heads: Heads, dtype: torch.dtype) -> Attend:
    """Return the same attention by the flash kernel, which reads filled columns only; for bf16 on CUDA.

    The queries of one key head are queries of one row without a mask. The kernel would bring them into this form by
    itself, with two more copies.
    """
    starts = torch.arange(len(positions) + 1, device=positions.device, dtype=torch.int32)
    filled, places = (positions + 1).to(torch.int32), starts * width
    groups = heads.queries // heads.keys
    store = stored_at(positions, width, heads)

    def attend(rotated: Tensor, values: Tensor, cache: Tensor) -> Tensor:
        by_key = store(rotated, values, cache).unflatten(1, (heads.keys, groups)).transpose(1, 2)
        all_keys, all_values = cache.flatten(0, 1).unbind(1)
        found = torch.ops.aten._flash_attention_forward(
            by_key.reshape(-1, heads.keys, heads.size),
            all_keys,
            all_values,
            starts * groups,
            places,
            groups,
            width,
            0.0,
            False,
            False,
            scale=heads.scale,
            seqused_k=filled,
        )
        return found[0].view(by_key.shape).transpose(1, 2).flatten(1, 2)

    return attend


def draw_in_blocks(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw as `sample_tokens` does without top-k and top-p, reading the logits once: a block, then one of its tokens.

    The sums have another order, so noise at the very border between two tokens may give the other token.
    """
    rows, vocabulary = logits.shape
    size = block_size(vocabulary)
    blocks = logits.view(rows, -1, size)
    # A block of banned tokens has no highest logit; its sum is 0 with any number in place of it.
    highs = blocks.amax(-1).float().clamp(min=torch.finfo(torch.float32).min)
    masses = ((blocks.float() - highs[:, :, None]) / temperature).exp().sum(-1)
    high = highs.amax(-1, keepdim=True)
    masses = masses * ((highs - high) / temperature).exp()

    def inside(block: Tensor) -> Tensor:
        chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, size)).squeeze(1).float()
        return (chosen - high) / temperature

    return draw_from_blocks(masses, noise, inside)


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

    def move(self, holes: Tensor, fillers: Tensor, columns: int) -> None:
        """Copy the rows in slots `fillers`, with at most `columns` tokens, to slots `holes`, int64, equally many."""
        self.cache[:, holes, :columns] = self.cache[:, fillers, :columns]
        for name in self.BY_ROW:
            values = getattr(self, name)
            values[holes] = values[fillers]


class StaticStep:
    """Decodes one more token for each of the first slots, on fixed buffers.

    `rotary`: cosines and sines [width, size] of `rotary_tables`. `attention`: masked_attention, flash_attention or
    decode_kernel.kernel_attention.
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
        self.rotary = rotary
        self.first, self.between, self.last = first_layer, between_layers, last_layer
        if compiled:
            self.first, self.between = torch.compile(first_layer), torch.compile(between_layers)
            self.last = torch.compile(last_layer)

    def logits(self, rows: int) -> Tensor:
        """Feed the newest tokens of the first `rows` slots and return the next tokens' logits [rows, vocab]."""
        slots, weights = self.slots, self.weights
        layers, heads, activation = weights.layers, weights.heads, weights.activation
        positions = slots.positions[:rows]
        attend = self.attention(positions, slots.width, heads, weights.dtype)
        hidden, cos, sin, rotated, values = self.first(slots.tokens[:rows], positions, self.rotary, weights)
        for index, (layer, following) in enumerate(pairwise(layers)):
            read = attend(rotated, values, slots.cache[index, :rows])
            hidden, rotated, values = self.between(hidden, read, layer, following, cos, sin, activation, heads)
        read = attend(rotated, values, slots.cache[-1, :rows])
        return F.linear(self.last(hidden, read, weights), *weights.head)

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
