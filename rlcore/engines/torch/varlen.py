"""Packed attention in kernels of variable length: a fixed number of calls for any number of rows.

A packed batch for these kernels has all distinct prompts first, then the responses, those of one prompt together. Each
response token attends to its prompt and to its own response. These are two calls of the flash kernel, over disjoint
keys; their results are added with the weights of their normalisers. In backward each call gets the added result and
normaliser, which makes its gradients those of the whole attention (Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

VARLEN_ATTENTION = "rlcore_varlen"


class Segments(NamedTuple):
    """The places of prompts and responses in a packed batch for the kernels.

    `own` int32 [n + 1]: the borders of all prompts and responses, in tokens. `responses` and `prompts` int32 [m + 1]:
    the borders of the responses of each prompt, from the first response on, and those of the prompts. All three end
    with repeated borders, so that few lengths occur. `sizes` int64 [4], on the CPU: the tokens of all prompts, the
    longest segment, the most response tokens of one prompt, and the longest prompt.
    """

    own: Tensor
    responses: Tensor
    prompts: Tensor
    sizes: Tensor

    def to(self, device: torch.device) -> Segments:
        """Return the same segments on `device`."""
        return Segments(self.own.to(device), self.responses.to(device), self.prompts.to(device), self.sizes)


@torch.library.custom_op("rlcore::flash", mutates_args=(), device_types="cuda")
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_borders: Tensor,
    key_borders: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention [tokens, heads, size] in segments, and its normalisers fp32 [heads, tokens]."""
    out, normaliser, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_borders,
        key_borders,
        longest_query,
        longest_key,
        0.0,
        causal,
        False,
        scale=scale,
    )
    return out, normaliser


@torch.library.custom_op("rlcore::flash_backward", mutates_args=(), device_types="cuda")
def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    query_borders: Tensor,
    key_borders: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given the whole attention's result and normalisers."""
    # The kernel reads the random state of dropout, which is off.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        grad,
        query,
        key,
        value,
        out,
        normaliser,
        query_borders,
        key_borders,
        longest_query,
        longest_key,
        0.0,
        causal,
        state,
        torch.empty(0, device=query.device),
        scale=scale,
    )


@torch.library.custom_op("rlcore::segment_attention", mutates_args=())
def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, own: Tensor, responses: Tensor, prompts: Tensor, sizes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [tokens, heads, size] and its normalisers fp32 [heads, tokens]; see Segments.

    `query` [tokens, heads, size], `key` and `value` [tokens, kv heads, size].
    """
    first, longest, most, longest_prompt = sizes.tolist()
    out, normaliser = flash(query, key, value, own, own, longest, longest, True, scale)
    if 0 < first < len(query):
        read, mass = flash(
            query[first:], key[:first], value[:first], responses, prompts, most, longest_prompt, False, scale
        )
        inside = normaliser[:, first:]
        whole = torch.logaddexp(inside, mass)
        shares = [(each - whole).exp().T[:, :, None] for each in (inside, mass)]
        out[first:] = (out[first:] * shares[0] + read * shares[1]).to(out.dtype)
        normaliser[:, first:] = whole
    return out, normaliser


@segment_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], len(query)), dtype=torch.float32)


@torch.library.custom_op("rlcore::segment_attention_backward", mutates_args=())
def segment_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    own: Tensor,
    responses: Tensor,
    prompts: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    first, longest, most, longest_prompt = sizes.tolist()
    grad = grad.contiguous()
    found = flash_backward(grad, query, key, value, out, normaliser, own, own, longest, longest, True, scale)
    if 0 < first < len(query):
        late = (grad[first:], query[first:], key[:first], value[:first], out[first:])
        of_responses = normaliser[:, first:].contiguous()
        more = flash_backward(*late, of_responses, responses, prompts, most, longest_prompt, False, scale)
        found[0][first:] += more[0]
        found[1][:first] += more[1]
        found[2][:first] += more[2]
    return found


@segment_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = segment_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None, None, None, None


segment_attention.register_autograd(_differentiate, setup_context=_keep)


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
    [1, tokens, heads, head size]. Raises ValueError when the model does not pass `segments` on.
    """
    if segments is None:
        raise ValueError(f"{type(module).__name__} did not pass the segments to its attention function")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    by_token = [each[0].transpose(0, 1).to(dtype).contiguous() for each in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = segment_attention(*by_token, *segments, scale)
    return out[None], None


def register_varlen_attention() -> Callable[..., Any]:
    """Register `rlcore_varlen` with transformers and return the function. May be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
    return varlen_attention
