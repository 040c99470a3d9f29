"""Log-probs and entropy of tokens from hidden states, without ever materialising all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE = 2**21
"""Logits in memory at one time on a CPU: few enough to stay in its caches from the first use to the last."""
DEVICE_TILE = 2**24
"""The same on other devices, where a tile must be large enough to be worth a dozen kernel launches."""


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
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.dtype, ctx.tiles = temperature, dtype, _tiles(hidden, weight, chunk)
        ctx.set_materialize_grads(False)
        # The running softmax of arXiv 1805.02867. For each position, over the logits x of the tiles so far: `high` is
        # the highest, `mass` the sum of exp(x - high), `moment` that of (x - high) exp(x - high), for the entropy.
        high = torch.full(labels.shape, torch.finfo(torch.float32).min, device=hidden.device)
        chosen, mass, moment = torch.zeros_like(high), torch.zeros_like(high), torch.zeros_like(high)
        every_row, every_column = ctx.tiles
        inputs = hidden.to(dtype)
        for columns in every_column:
            part = weight[columns].to(dtype)
            for rows in every_row:
                x = _logits(inputs[rows], part, None if bias is None else bias[columns], temperature)
                inside, at = _find(labels[rows], columns.start, len(part))
                chosen[rows] += x.gather(-1, at).squeeze(-1).where(inside, 0)
                peak = torch.maximum(high[rows], x.amax(-1))
                fall = high[rows] - peak
                powers = x.sub_(peak[:, None]).exp()
                moment[rows] = fall.exp() * (moment[rows] + fall * mass[rows]) + x.mul_(powers).sum(-1)
                mass[rows] = fall.exp() * mass[rows] + powers.sum(-1)
                high[rows] = peak
        normaliser, entropy = high + mass.log(), mass.log() - moment / mass
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        # The gradient of a logit is -p * (slope * log p + offset), plus `gain` if the logit is the label's.
        gain, slope = (None if grad is None else grad / ctx.temperature for grad in grads)
        offset = torch.zeros_like(normaliser) if gain is None else gain
        if slope is not None:
            offset = offset + slope * entropy
        every_row, every_column = ctx.tiles
        inputs = hidden.to(ctx.dtype)
        # Sums over tiles are in fp32: in bf16 small terms would be lost.
        sums = torch.promote_types(ctx.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden, dtype=sums)
        grad_weight, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        for columns in every_column:
            part = weight[columns].to(ctx.dtype)
            part_grad, part_bias = torch.zeros_like(part, dtype=sums), part.new_zeros(len(part), dtype=sums)
            for rows in every_row:
                x = _logits(inputs[rows], part, None if bias is None else bias[columns], ctx.temperature)
                x.sub_(normaliser[rows, None])
                if slope is None:
                    grad = x.exp_().mul_(-offset[rows, None])
                else:
                    p = x.exp()
                    grad = x.mul_(-slope[rows, None]).sub_(offset[rows, None]).mul_(p)
                if gain is not None:
                    inside, at = _find(labels[rows], columns.start, len(part))
                    grad.scatter_add_(-1, at, gain[rows].where(inside, 0)[:, None])
                if grad_bias is not None:
                    part_bias += grad.sum(0)
                grad = grad.to(ctx.dtype)
                _add_product(grad_hidden[rows], grad, part)
                _add_product(part_grad, grad.T, inputs[rows])
            grad_weight[columns] = part_grad
            if grad_bias is not None:
                grad_bias[columns] = part_bias
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def _tiles(hidden: Tensor, weight: Tensor, chunk: int) -> tuple[list[slice], list[slice]]:
    """Return the row slices and the column slices of the tiles; there is at least one of each, even for no position."""
    positions, vocabulary = len(hidden), len(weight)
    size = TILE if hidden.device.type == "cpu" else DEVICE_TILE
    width = max(1, size // max(1, min(chunk, positions)))
    rows = [slice(start, start + chunk) for start in range(0, max(1, positions), chunk)]
    return rows, [slice(start, start + width) for start in range(0, vocabulary, width)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return logits, fp32, in new memory that the caller may overwrite."""
    logits = torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype)).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _find(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return whether each label lies in the `width` columns from `start`, [rows], and its column there, [rows, 1]."""
    at = labels - start
    return (at >= 0) & (at < width), at.clamp(0, width - 1)[:, None]


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
) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy), fp32 [positions], in nats, of softmax((hidden @ weight.T + bias) / temperature).

    `hidden` is [positions, hidden], `weight` [vocab, hidden], `labels` int64 [positions]. Forward and backward hold at
    most 2**21 logits at a time (2**24 off the CPU), of at most `chunk` positions. Matrix products are in autocast's
    dtype if autocast is on, else in that of `hidden`. Both results are differentiable in hidden, weight and bias; an
    unused result costs nothing in backward.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):  # backward must recompute exactly forward's products
        log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, labels, temperature, chunk, dtype)
    return log_probs, entropy


def token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy), fp32 [...], of `labels` int64 [...] under full `logits` [..., vocab]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
