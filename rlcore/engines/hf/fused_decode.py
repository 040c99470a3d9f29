"""One token of each row through a decoder of the Llama family, in as few kernels as possible.

A module of transformers spends most of a small step's time outside the kernels, on masks, copies and calls. Here the
step is written out: projections of the same input are one product, the query heads that share a key head attend as
queries of one row, and nothing is computed twice. A probe compares it with the module's own forward before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcore.engine.adapter import LoraLinear
from rlcore.engine.parallel.model_shape import FULL_ATTENTION, attention_kinds
from rlcore.engines.hf.cache import BufferedCache

log = logging.getLogger(__name__)

LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer"}
"""Decoder layers with rotary positions, RMS norms before attention and feed-forward, and a gated feed-forward."""

ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary positions whose frequencies do not depend on the length."""


def make_adjacent(*modules: nn.Linear) -> None:
    """Move the weights of linear layers that read the same input next to each other in memory.

    They stay the layers' own parameters, as views.
    """
    for parts in _weights_and_biases(modules):
        at, buffer = 0, torch.cat([part.detach() for part in parts])
        for part in parts:
            part.data = buffer[at : at + len(part)]
            at += len(part)


def fused_weights(modules: Sequence[nn.Linear], dtype: torch.dtype) -> list[Tensor]:
    """Return the weight [outputs of all, inputs], and the bias if there is one, of several linear layers as one layer.

    Returns views if the parts are adjacent in memory and have the `dtype`, else copies.
    """
    parts = [[part.detach() for part in parts] for parts in _weights_and_biases(modules)]
    wholes = [(each, adjacent(each)) for each in parts]
    return [(torch.cat(each) if whole is None else whole).to(dtype) for each, whole in wholes]


@dataclass(frozen=True)
class Product:
    """Several linear layers that read the same input, as one: y = W x + bias + B A x.

    `weight` [outputs of all, inputs], `bias` [outputs of all]. `a` [ranks of all, inputs] and `b` [outputs of all,
    ranks of all], the adapters' scale in it, are of the layers that have an adapter; None where none has.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None

    @staticmethod
    def of(modules: Sequence[nn.Linear], dtype: torch.dtype) -> Product:
        """Return the product of layers with their current weights. See `fused_weights`."""
        weight, *bias = fused_weights(modules, dtype)
        a = b = None
        if any(isinstance(module, LoraLinear) for module in modules):
            ranks = [(m.lora_a, m.lora_b * m.scale) if isinstance(m, LoraLinear) else _no_adapter(m) for m in modules]
            a = torch.cat([into for into, _ in ranks]).detach().to(dtype)
            b = torch.block_diag(*(out for _, out in ranks)).detach().to(dtype)
        return Product(weight, bias[0] if bias else None, a, b)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return y [..., outputs of all] of x [..., inputs]."""
        outputs = F.linear(inputs, self.weight, self.bias)
        return outputs if self.a is None or self.b is None else outputs + F.linear(F.linear(inputs, self.a), self.b)


def _no_adapter(module: nn.Linear) -> tuple[Tensor, Tensor]:
    return module.weight.new_zeros(0, module.in_features), module.weight.new_zeros(module.out_features, 0)


def _weights_and_biases(modules: Sequence[nn.Linear]) -> list[list[Tensor]]:
    weights: list[Tensor] = [module.weight for module in modules]
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    return [weights, biases] if biases else [weights]


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the parts as one tensor if they are adjacent in memory, as a view; else None."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or not part.is_contiguous() or part.untyped_storage() != first.untyped_storage():
            return None
        at += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


class FusedDecodeStep:
    """The decoding step of a Hugging Face causal language model, on the module's own weights.

    `dtype` is that of the products and of the keys and values; the residual stream and the norms are in fp32.
    """

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        self.hf, self.dtype = hf, dtype
        base = getattr(hf, hf.base_model_prefix)
        self._base, config = base, hf.config.get_text_config()
        self._head_size = base.layers[0].self_attn.head_dim
        self._heads = base.layers[0].self_attn.q_proj.out_features // self._head_size
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._key_heads = self._heads // self._groups
        for layer in base.layers:
            for modules in linear_groups(layer):
                if len(modules) > 1:
                    make_adjacent(*modules)
        self._products: list[list[Product]] = []
        self._head: Product | None = None
        self._positions = 0

    @staticmethod
    def of(hf: Any, dtype: torch.dtype) -> tuple[FusedDecodeStep | None, str]:
        """Return the step for `hf`, or None if it does not support the module; and a description with the reason."""
        reason = unsupported(hf)
        if reason is None:
            step = FusedDecodeStep(hf, dtype)
            error = step.probe()
            if error <= (1e-4 if dtype is torch.float32 else 5e-2):
                return step, "decodes in few kernels"
            reason = f"its log-probs would be off by {error:.2g}"
        description = f"decodes with the module's own forward, as {reason}"
        log.info("%s %s", type(hf).__name__, description)
        return None, description

    def prepare(self, positions: int, device: torch.device) -> None:
        """Read the current weights, cast or concatenated where necessary, and keep them until `release`.

        Rotary tables cover the first `positions` positions; a later call with more extends them.
        """
        if not self._products:
            layers = self._base.layers
            self._products = [[Product.of(modules, self.dtype) for modules in linear_groups(layer)] for layer in layers]
            self._head = Product.of([self.hf.get_output_embeddings()], self.dtype)
        if positions > self._positions:
            self._positions = positions
            self._cos, self._sin = rotary_tables(self._base, positions, device)

    def release(self) -> None:
        """Drop the weights: copies would take memory from training, and views keep buffers alive."""
        self._products, self._head, self._positions = [], None, 0

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: BufferedCache) -> Tensor:
        """Return the logits [rows, vocab] after further tokens of each row, int64 [rows, new], at `positions`.

        Only after `prepare`. `positions` int64 [rows, new]. `mask` fp32 [rows, new, columns of the cache and the new
        ones]: 0 for a column that the token attends to, else -inf; None if each token attends to all columns.
        """
        (rows, new), size, heads, keys = tokens.shape, self._head_size, self._heads, self._key_heads
        place = positions.flatten()
        cos, sin = self._cos[place][:, None], self._sin[place][:, None]
        bias = None
        if mask is not None:  # the heads of a group read the same keys, so they are queries like the new tokens
            bias = mask.to(self.dtype)[:, None, None].expand(-1, -1, self._groups, -1, -1).flatten(2, 3)
        hidden = F.embedding(tokens.flatten(), self._base.embed_tokens.weight).float()
        for layer, products, kept in zip(self._base.layers, self._products, cache.layers, strict=True):
            qkv, out, gate_up, down = products
            attention = layer.self_attn
            states = qkv(_norm(layer.input_layernorm, hidden).to(self.dtype)).view(rows * new, -1, size)
            rotated, values = states[:, : heads + keys], states[:, heads + keys :]
            if hasattr(attention, "q_norm"):
                parts = (_norm(attention.q_norm, states[:, :heads]), _norm(attention.k_norm, rotated[:, heads:]))
                rotated = torch.cat(parts, dim=1)
            rotated = torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), sin).to(self.dtype)
            k, v = kept.update(_by_head(rotated[:, heads:], rows), _by_head(values, rows))
            queries = _by_head(rotated[:, :heads], rows).reshape(rows, keys, self._groups * new, size)
            read = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=attention.scaling)
            read = read.view(rows, heads, new, size).transpose(1, 2)
            if layer is self._base.layers[-1]:  # of the last layer only the last token is read
                read, hidden = read[:, -1], hidden.view(rows, new, -1)[:, -1]
            hidden = hidden + out(read.reshape(-1, heads * size))
            gate, up = gate_up(_norm(layer.post_attention_layernorm, hidden).to(self.dtype)).chunk(2, -1)
            hidden = hidden + down(layer.mlp.act_fn(gate) * up)
        assert self._head is not None
        return self._head(_norm(self._base.norm, hidden).to(self.dtype))

    @torch.no_grad()
    def probe(self) -> float:
        """Return the largest difference of a log-prob to the module's own, on two short rows of different length."""
        device = next(self.hf.parameters()).device
        vocabulary = self.hf.get_input_embeddings().weight.shape[0]
        # Scattered token ids, all different.
        ids = torch.arange(12, device=device) * 7 % min(vocabulary, 89) + 3
        ids = ids.clamp(max=vocabulary - 1).view(2, 6)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        caches = [BufferedCache(len(self._base.layers), 6) for _ in range(2)]
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.dtype is not torch.float32)
        with autocast:
            for cache in caches:
                self.hf(input_ids=ids[:, :4], attention_mask=mask[:, :4], position_ids=places[:, :4], **_cached(cache))
        seen = torch.zeros(2, 6, device=device).masked_fill(mask == 0, float("-inf"))
        for cache in caches:
            cache.select(torch.arange(2, device=device), self.dtype)
        worst = 0.0
        self.prepare(6, device)
        for at in (4, 5):
            with autocast:
                new = {"input_ids": ids[:, at : at + 1], "position_ids": places[:, at : at + 1]}
                expected = self.hf(**new, attention_mask=mask[:, : at + 1], **_cached(caches[0])).logits[:, -1]
            got = self.step(new["input_ids"], new["position_ids"], seen[:, None, : at + 1], caches[1])
            apart = got.float().log_softmax(-1) - expected.float().log_softmax(-1)
            worst = max(worst, float(apart.abs().max()))
        self.release()
        return worst


def rotary_tables(base: Any, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, head size] of a decoder's rotary positions, for a product with `roll`.

    rotate_half(x) * sin is roll(x) times sin with its first half negative.
    """
    zero = torch.zeros((), device=device, dtype=torch.float32)
    cos, sin = base.rotary_emb(zero, torch.arange(positions, device=device)[None])
    half = sin.shape[-1] // 2
    return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def linear_groups(layer: Any) -> list[tuple[nn.Linear, ...]]:
    """Return the linear layers of a decoder layer in order of use, those that read the same input in one tuple."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = (attention.q_proj, attention.k_proj, attention.v_proj)
    return [heads, (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]


def _cached(cache: BufferedCache) -> dict[str, Any]:
    return {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}


def _by_head(states: Tensor, rows: int) -> Tensor:
    """Return `states` [rows * tokens, heads, head size] as [rows, heads, tokens, head size]."""
    return states.view(rows, -1, *states.shape[1:]).transpose(1, 2)


def _norm(module: Any, values: Tensor) -> Tensor:
    return F.rms_norm(values, module.weight.shape, module.weight.to(values.dtype), module.variance_epsilon)


def unsupported(hf: Any) -> str | None:
    """Return the reason why the fused step cannot run the module; None if it may."""
    base = getattr(hf, hf.base_model_prefix, None)
    kinds = {type(layer).__name__ for layer in getattr(base, "layers", ())}
    if base is None or not kinds or not kinds <= LAYERS:
        return f"no fast form of {', '.join(sorted(kinds)) or 'its layers'} is known"
    if attention_kinds(hf.config) != FULL_ATTENTION:
        return f"no fast form of {', '.join(sorted(attention_kinds(hf.config)))} is known"
    rope = base.rotary_emb.rope_type
    if rope not in ROPES:
        return f"its rotary positions of type {rope!r} depend on the length"
    return None
