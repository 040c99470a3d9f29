"""Log-probs and entropy of tokens from hidden states, without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ChunkedLogProbs(torch.autograd.Function):
    """Backward recomputes each chunk's logits; saved are the inputs and one logsumexp and entropy per position."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, bias, temperature)
            normaliser[rows] = torch.logsumexp(logits, dim=-1)
            log_probs[rows] = logits.gather(-1, labels[rows, None]).squeeze(-1) - normaliser[rows]
            probs = (logits - normaliser[rows, None]).exp_()
            entropy[rows] = normaliser[rows] - probs.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        # The weight's gradient is summed over chunks in fp32 so that bf16 does not lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[rows], weight, bias, ctx.temperature) - normaliser[rows, None]
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_log_probs is not None:
                g = grad_log_probs[rows, None]
                grad -= g * p
                grad.scatter_add_(-1, labels[rows, None], g.to(grad.dtype))
            if grad_entropy is not None:
                grad -= grad_entropy[rows, None] * p * (log_p + entropy[rows, None])
            grad /= ctx.temperature
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += (grad.T @ hidden[rows]).float()
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias).float() / temperature


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
    logits at one time, in forward and in backward. Differentiable in hidden, weight and bias, through both results.
    """
    log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, labels, temperature, chunk)
    return log_probs, entropy


def token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy), fp32 [...], of `labels` int64 [...] under full `logits` [..., vocab]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
