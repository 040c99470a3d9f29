"""Packed attention in kernels of variable length: a fixed number of calls for any number of rows.

A packed batch for these kernels has all distinct prompts first, then the responses, those of one prompt together. A
response token attends to its prompt and to its own response. These are two calls of the flash kernel over disjoint
keys; their results are added with the weights of their normalisers. In backward each call gets the sum and its
normaliser, which makes its gradients those of the whole attention, as in Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

VARLEN_ATTENTION = "rlcore_varlen"


class Segments(NamedTuple):
    """The places of prompts and responses in a packed batch, in tokens.

    `own` int32 [n + 1]: the borders of all prompts and responses. `responses` int32 [m + 1]: the borders of the
    responses of each prompt. `prompts` int32 [m + 1]: the borders of the prompts, which end where `responses` begins.
    All three end with repeated borders, so that few lengths occur. `longest` int64 [3], on the CPU: the longest of
    each.
    """

    own: Tensor
    responses: Tensor
    prompts: Tensor
    longest: Tensor

    def to(self, device: torch.device) -> Segments:
        """Return the same segments on `device`."""
        return Segments(self.own.to(device), self.responses.to(device), self.prompts.to(device), self.longest)


# Operators of their own hide lengths from the compiler, which would make new code for each length. They are defined
# without torch.library.custom_op, whose checks cost more host time than the kernels take.
_LIBRARY = torch.library.Library("rlcore", "DEF")
_LIBRARY.define(
    "flash(Tensor query, Tensor key, Tensor value, Tensor own, Tensor keys, Tensor longest, int[] of, bool causal, "
    "float scale) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "flash_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor normaliser, Tensor own, "
    "Tensor keys, Tensor longest, int[] of, bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Tensor,
    keys: Tensor,
    longest: Tensor,
    of: list[int],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention [tokens, heads, size] and its normalisers fp32 [heads, tokens].

    The queries between two borders of `own` see the keys between the same two borders of `keys`. What lies outside of
    the borders is not written. `of`: the indices in `longest` of the longest segments of queries and of keys.
    """
    lengths = longest.tolist()
    bounds = (own, keys, lengths[of[0]], lengths[of[1]])
    found = torch.ops.aten._flash_attention_forward(query, key, value, *bounds, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    own: Tensor,
    keys: Tensor,
    longest: Tensor,
    of: list[int],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `out` and `normaliser` are those of the whole attention."""
    lengths = longest.tolist()
    bounds = (own, keys, lengths[of[0]], lengths[of[1]])
    # The random state of dropout, which is off.
    state = (torch.empty(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device))
    with _strictly_deterministic():
        return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, normaliser, *bounds, 0.0, causal, *state, scale=scale
        )


@contextmanager
def _strictly_deterministic() -> Iterator[None]:
    """Where deterministic kernels are asked for with warnings only, ask without: else the flash kernel ignores it."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


_LIBRARY.impl("flash", _flash, "CUDA")
_LIBRARY.impl("flash_backward", _flash_backward, "CUDA")


def _flash_shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def _flash_backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


torch.library.register_fake("rlcore::flash", _flash_shapes, lib=_LIBRARY)
torch.library.register_fake("rlcore::flash_backward", _flash_backward_shapes, lib=_LIBRARY)


class _SegmentAttention(torch.autograd.Function):
    """Causal attention of `query` [tokens, heads, size] over `key` and `value` [tokens, kv heads, size]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Tensor,
        responses: Tensor,
        prompts: Tensor,
        longest: Tensor,
        scale: float,
    ) -> Tensor:
        flash = torch.ops.rlcore.flash
        inside, own_mass = flash(query, key, value, own, own, longest, [0, 0], True, scale)
        before, prompt_mass = flash(query, key, value, responses, prompts, longest, [1, 2], False, scale)
        is_response = _is_response(query, responses)
        normaliser = torch.where(is_response, torch.logaddexp(own_mass, prompt_mass), own_mass)
        shares = [(mass - normaliser).exp().T[:, :, None] for mass in (own_mass, prompt_mass)]
        whole = inside * shares[0] + torch.where(is_response[:, None, None], before * shares[1], 0)
        out = whole.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, normaliser, own, responses, prompts, longest)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser, own, responses, prompts, longest = ctx.saved_tensors
        given = (grads[0].contiguous(), query, key, value, out, normaliser)
        flash_backward = torch.ops.rlcore.flash_backward
        inside = flash_backward(*given, own, own, longest, [0, 0], True, ctx.scale)
        before = flash_backward(*given, responses, prompts, longest, [1, 2], False, ctx.scale)
        is_response = _is_response(query, responses)[:, None, None]
        # Only responses have queries to prompts, and only prompts have keys for them.
        covered = (is_response, ~is_response, ~is_response)
        sums = [one + torch.where(where, two, 0) for one, two, where in zip(inside, before, covered, strict=True)]
        return *sums, None, None, None, None, None


def _is_response(query: Tensor, responses: Tensor) -> Tensor:
    """Return whether each token is a response's, bool [tokens]."""
    return torch.arange(query.shape[0], device=query.device) >= responses[0]


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch, in the signature of transformers' attention functions.

    `query` [1, heads, tokens, head size], `key` and `value` [1, kv heads, tokens, head size]; returns
    [1, tokens, heads, head size], in autocast's dtype if autocast is on. Raises ValueError when the model does not pass
    `segments` on.
    """
    if segments is None:
        raise ValueError(f"{type(module).__name__} did not pass the segments to its attention function")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    by_token = [each[0].transpose(0, 1).to(dtype).contiguous() for each in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _SegmentAttention.apply(*by_token, *segments, scale)[None], None


def register_varlen_attention() -> Callable[..., Any]:
    """Register `rlcore_varlen` with transformers and return the function. May be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
    return varlen_attention
