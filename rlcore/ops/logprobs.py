"""Log-probs and entropy of tokens from hidden states, without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE = 2**21
"""Logits that exist at one time on a CPU: few enough that its caches hold them from the first use to the last."""
DEVICE_TILE = 2**24
"""The same on other devices, where a tile has to be worth launching a dozen kernels."""


class _ChunkedLogProbs(torch.autograd.Function):
    """Goes over tiles of logits, some positions by some of the vocabulary, in forward and, made again, in backward.

    Saved are the inputs and one normaliser and entropy per position. `dtype`: of the matrix products.
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
        # For each position, over the logits so far (the running softmax of arXiv 1805.02867): the highest, and of the
        # rest less that, the sum of the powers and of the powers times themselves, which gives the entropy.
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
        # The gradient of a logit: `gain` for the label's own, less p * (slope * log p + offset).
        gain, slope = (None if grad is None else grad / ctx.temperature for grad in grads)
        offset = torch.zeros_like(normaliser) if gain is None else gain
        if slope is not None:
            offset = offset + slope * entropy
        every_row, every_column = ctx.tiles
        inputs = hidden.to(ctx.dtype)
        # Sums over tiles are in fp32 so that bf16 does not lose the small ones.
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
    """Return the rows and the columns of the tiles; no position at all is one tile too."""
    positions, vocabulary = len(hidden), len(weight)
    size = TILE if hidden.device.type == "cpu" else DEVICE_TILE
    width = max(1, size // max(1, min(chunk, positions)))
    rows = [slice(start, start + chunk) for start in range(0, max(1, positions), chunk)]
    return rows, [slice(start, start + width) for start in range(0, vocabulary, width)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return new logits, fp32, the caller's to overwrite."""
    logits = torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype)).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _find(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which labels lie in the columns from `start`, [rows], and at which of them, [rows, 1]."""
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

    `hidden` [positions, hidden], `weight` [vocab, hidden], `labels` int64 [positions]. At most `chunk` positions have
    logits at one time, and few enough tokens of the vocabulary that those are 2**21 logits (2**24 off the CPU), in
    forward and in backward. Products are in autocast's dtype where it is on, else in that of `hidden`. Differentiable
    in hidden, weight and bias, through both results; a result that is not used costs backward nothing.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):  # so that forward's products are the ones that backward makes again
        log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, labels, temperature, chunk, dtype)
    return log_probs, entropy


def token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy), fp32 [...], of `labels` int64 [...] under full `logits` [..., vocab]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
