"""Log-probs and entropy of tokens from hidden states, without ever materialising all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE = 2**21
"""Logits in memory at one time on a CPU: few enough to stay in its caches from the first use to the last."""
DEVICE_TILE = 2**24
"""The same on other devices, where a tile must be large enough to be worth a dozen kernel launches."""
COMPILED_TILE = 2**26
"""The same with compiled passes, where a tile must be large enough for fast matrix products."""


class _ChunkedLogProbs(torch.autograd.Function):
    """Computes log-probs and entropy tile by tile; a tile is the logits of some positions for part of the vocabulary.

    Backward recomputes the tiles: forward saves only the inputs, and one normaliser and one entropy per position.
    `dtype` is that of the matrix products.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.dtype, ctx.compiled = temperature, dtype, compiled
        ctx.tiles = _tiles(hidden, weight, chunk, compiled)
        ctx.set_materialize_grads(False)
        high = torch.full(labels.shape, torch.finfo(torch.float32).min, device=hidden.device)
        sums = chosen, mass, moment = [torch.zeros_like(high) for _ in range(3)]
        every_row, every_column = ctx.tiles
        inputs, add_tile = hidden.to(dtype), _compiled(_add_tile) if compiled else _add_tile
        for columns in every_column:
            part = weight[columns].to(dtype)
            for rows in every_row:
                x = _product(inputs[rows], part, None if bias is None else bias[columns])
                so_far = [each[rows] for each in (high, *sums)]
                for total, value in zip(
                    so_far, add_tile(x, labels[rows] - columns.start, temperature, *so_far), strict=True
                ):
                    total.copy_(value)
        normaliser, entropy = high + mass.log(), mass.log() - moment / mass
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        gain, slope = (None if grad is None else grad / ctx.temperature for grad in grads)
        offset = torch.zeros_like(normaliser) if gain is None else gain
        if slope is not None:
            offset = offset + slope * entropy
        every_row, every_column = ctx.tiles
        inputs, tile_gradient = hidden.to(ctx.dtype), _compiled(_tile_gradient) if ctx.compiled else _tile_gradient
        # Sums over tiles are in fp32: in bf16 small terms would be lost.
        sums = torch.promote_types(ctx.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden, dtype=sums)
        grad_weight, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        for columns in every_column:
            part = weight[columns].to(ctx.dtype)
            part_grad, part_bias = torch.zeros_like(part, dtype=sums), part.new_zeros(len(part), dtype=sums)
            for rows in every_row:
                x = _product(inputs[rows], part, None if bias is None else bias[columns])
                by_row: list[Any] = [None if each is None else each[rows] for each in (normaliser, offset, gain, slope)]
                grad = tile_gradient(x, labels[rows] - columns.start, ctx.temperature, *by_row)
                if grad_bias is not None:
                    part_bias += grad.sum(0)
                grad = grad.to(ctx.dtype)
                _add_product(grad_hidden[rows], grad, part)
                _add_product(part_grad, grad.T, inputs[rows])
            grad_weight[columns] = part_grad
            if grad_bias is not None:
                grad_bias[columns] = part_bias
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None, None


def _tiles(hidden: Tensor, weight: Tensor, chunk: int, compiled: bool) -> tuple[list[slice], list[slice]]:
    """Return the row slices and the column slices of the tiles; there is at least one of each, even for no position."""
    positions, vocabulary = len(hidden), len(weight)
    rows = [slice(start, start + chunk) for start in range(0, max(1, positions), chunk)]
    chunk = max(1, min(chunk, positions))
    if compiled:  # for one shape: tiles of equal width, whose rows begin where a GPU reads best
        width = vocabulary
        while 3 * width * chunk > 4 * COMPILED_TILE and width % 32 == 0:
            width //= 2
    else:
        width = max(1, (TILE if hidden.device.type == "cpu" else DEVICE_TILE) // chunk)
    return rows, [slice(start, start + width) for start in range(0, vocabulary, width)]


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits at temperature 1, in new memory that the caller may overwrite."""
    return torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))


def _add_tile(
    x: Tensor, at: Tensor, temperature: float, high: Tensor, chosen: Tensor, mass: Tensor, moment: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `high`, `chosen`, `mass` and `moment`, fp32 [rows], with one more tile of logits [rows, columns] in them.

    The running softmax of arXiv 1805.02867. For each position, over the logits x of the tiles so far: `high` is the
    highest, `chosen` the label's, `mass` the sum of exp(x - high), `moment` that of (x - high) exp(x - high), for the
    entropy. The label of a row is column `at`, int64 [rows], of the tile, if the tile has that column.
    """
    x = _scaled(x, temperature)
    inside = (at >= 0) & (at < x.shape[1])
    found = x.gather(-1, at.clamp(0, x.shape[1] - 1)[:, None]).squeeze(-1)
    chosen = chosen + found.where(inside, 0)
    peak = torch.maximum(high, x.amax(-1))
    fall = high - peak
    x = torch.sub(x, peak[:, None], out=_memory_of(x))
    powers = x.exp()
    moment = fall.exp() * (moment + fall * mass) + torch.mul(x, powers, out=_memory_of(x)).sum(-1)
    return peak, chosen, fall.exp() * mass + powers.sum(-1), moment


def _tile_gradient(
    x: Tensor,
    at: Tensor,
    temperature: float,
    normaliser: Tensor,
    offset: Tensor,
    gain: Tensor | None,
    slope: Tensor | None,
) -> Tensor:
    """Return the gradient of a tile's logits: -p * (slope * log p + offset), plus `gain` for the label's logit."""
    dtype, x = x.dtype, _scaled(x, temperature)
    x = torch.sub(x, normaliser[:, None], out=_memory_of(x))
    if slope is None:
        grad = torch.mul(torch.exp(x, out=_memory_of(x)), -offset[:, None], out=_memory_of(x))
    else:
        p = x.exp()
        grad = torch.mul(x, -slope[:, None], out=_memory_of(x))
        grad = torch.sub(grad, offset[:, None], out=_memory_of(x))
        grad = torch.mul(grad, p, out=_memory_of(x))
    if gain is None:
        return grad
    if torch.compiler.is_compiling():
        own = torch.arange(x.shape[1], device=x.device) == at[:, None]
        return torch.where(own, grad + gain[:, None], grad).to(dtype)
    inside = (at >= 0) & (at < x.shape[1])
    return grad.scatter_add_(-1, at.clamp(0, x.shape[1] - 1)[:, None], gain.where(inside, 0)[:, None])


def _scaled(x: Tensor, temperature: float) -> Tensor:
    """Return logits in fp32 at a temperature, in the memory of `x` where that is fp32."""
    x = x.float()
    return x if temperature == 1 else torch.div(x, temperature, out=_memory_of(x))


def _memory_of(x: Tensor) -> Tensor | None:
    """Return the memory for a result that replaces `x`; None under a compiler, which reuses memory by itself."""
    return None if torch.compiler.is_compiling() else x


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 4096,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy), fp32 [positions], in nats, of softmax((hidden @ weight.T + bias) / temperature).

    `hidden` is [positions, hidden], `weight` [vocab, hidden], `labels` int64 [positions]. Forward and backward hold at
    most 2**21 logits at a time (2**24 off the CPU), of at most `chunk` positions. Matrix products are in autocast's
    dtype if autocast is on, else in that of `hidden`. Both results are differentiable in hidden, weight and bias; an
    unused result costs nothing in backward.

    `compiled`: torch.compile fuses the passes over a tile, which then has about 2**26 logits. The compiler takes some
    seconds at the first call.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):  # backward must recompute exactly forward's products
        return _ChunkedLogProbs.apply(hidden, weight, bias, labels, temperature, chunk, dtype, compiled)


def token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy), fp32 [...], of `labels` int64 [...] under full `logits` [..., vocab]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
