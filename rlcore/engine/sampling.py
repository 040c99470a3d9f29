"""The sampling distribution: from a row of logits to one token and its log-prob."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.engine.rollout import Sampling

BLOCK_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def sample_tokens(
    logits: Tensor, noise: Tensor, sampling: Sampling, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [rows], log_probs fp32 [rows]) from `logits` [rows, vocab] and `noise` [rows] in [0, 1).

    Applies `banned` token ids, temperature, top-k and top-p, in the order of vLLM and transformers. The log-probs are
    those of the sampling distribution, renormalised after each cut. Temperature 0 takes the likeliest token, with
    log-prob 0.
    """
    logits = logits.float()
    if banned is not None and len(banned):
        logits = logits.index_fill(-1, banned, float("-inf"))
    if sampling.temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    logits = _cut(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    log_probs = torch.log_softmax(logits, dim=-1)
    tokens = draw_tokens(log_probs, noise)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def draw_tokens(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Return int64 [rows]: one token from each distribution, by inverse transform of its uniform number.

    `log_probs` fp32 [rows, vocab], in nats, -inf for a token that cannot be drawn; `noise` fp64 [rows] in [0, 1).
    """
    cumulative = log_probs.exp().cumsum(-1)
    # The total is 1 up to rounding; scaled by it, every draw falls on a token. The first cumulative sum above the draw
    # never belongs to a token with probability 0.
    draw = noise.to(cumulative.dtype)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draw, right=True).squeeze(-1)
    # A draw rounded up to the total itself would fall behind the last token; it belongs to the last possible one.
    return torch.minimum(tokens, _last_possible(log_probs))


def block_size(vocabulary: int) -> int:
    """Return the number of neighbouring tokens in a block of `draw_from_blocks`; it divides the vocabulary."""
    return next(size for size in BLOCK_SIZES if vocabulary % size == 0)


def draw_from_blocks(masses: Tensor, noise: Tensor, inside: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [rows], log-probs fp32 [rows]): a block of tokens is drawn, and then one of its tokens.

    `masses` fp32 [rows, blocks] are the sums of exp(logit - highest logit of the row) over each block; `noise` fp64
    [rows] in [0, 1). `inside` returns these differences [rows, size] for blocks int64 [rows, 1]. So nothing of the size
    of the logits is summed up or normalised. A token with probability 0 is never drawn.
    """
    ends = masses.cumsum(-1)
    # Keeps a draw below the last sum after rounding: no token lies beyond it.
    under = 1 - 2**-23
    draw = torch.minimum(noise.float()[:, None] * ends[:, -1:], ends[:, -1:] * under)
    block = torch.searchsorted(ends, draw, right=True)
    scaled = inside(block)
    sums = scaled.exp().cumsum(-1)
    # The end before, as the search saw it: `ends - masses` may round above it, and a draw below 0 would give any first
    # token.
    draw = torch.minimum(draw - F.pad(ends, (1, 0)).gather(1, block), sums[:, -1:] * under)
    token = torch.searchsorted(sums, draw, right=True)
    log_probs = scaled.gather(1, token) - ends[:, -1:].log()
    return (block * scaled.shape[1] + token).squeeze(-1), log_probs.squeeze(-1)


def _last_possible(log_probs: Tensor) -> Tensor:
    possible = log_probs.exp() > 0
    return possible.shape[-1] - 1 - possible.flip(-1).to(torch.uint8).argmax(-1)


def _cut(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p < 1:
        values, order = logits.sort(dim=-1, descending=True)
        probs = values.softmax(-1)
        # A token stays if those before it hold less than top_p; the first always does.
        dropped = probs.cumsum(-1) - probs >= top_p
        dropped[:, 0] = False
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
    return logits
