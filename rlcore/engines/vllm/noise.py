"""Noise by name in vLLM's sampler, for a whole batch at once and without waiting for the device.

`noise_v1` and `noise_v2` put it into vLLM's two model runners, each by a logits processor, vLLM's documented extension,
and by one method of its sampler that they replace. A request names its noise in `SamplingParams.extra_args[EXTRA]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.engine import block_size, draw_from_blocks
from rlcore.ops import uniform_noise

EXTRA = "rlcore_noise"
"""A row's noise key and the length of its prompt."""


def next_noise(names: Tensor, lengths: Tensor) -> Tensor:
    """Return fp64 [rows] in [0, 1): the numbers of the next tokens of rows that have `lengths` int [rows] tokens.

    `names` int64 [rows, 2]: noise key and length of the prompt. The number of a token is its index in the response. It
    needs no host: vLLM has the lengths on the device. A row within its prompt gets a number too; vLLM discards its
    token.
    """
    keys, prompts = names.unbind(1)
    return uniform_noise(keys, lengths - prompts, 1)[:, 0]


def draw(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [rows], log-probs fp32 [rows]) of one draw from each row of fp32 `logits` [rows, vocab].

    `noise` fp64 [rows] in [0, 1). Draws a block of neighbouring tokens and then one of them, so that no log_softmax and
    no cumulative sum over the vocabulary is written. Subtracts each row's maximum from `logits`, in place.
    """
    rows, vocabulary = logits.shape
    size = block_size(vocabulary)
    logits -= logits.amax(-1, keepdim=True)
    blocks = logits.reshape(rows, -1, size)

    def inside(block: Tensor) -> Tensor:
        return blocks.gather(1, block[:, :, None].expand(-1, 1, size)).squeeze(1)

    return draw_from_blocks(blocks.exp().sum(-1), noise, inside)


def on_device(names: list[tuple[int, int]], device: torch.device, *, pin: bool) -> Tensor:
    """Return int64 [rows, 2] on the device; nothing waits for the copy where `pin` is True."""
    table = torch.tensor(names, dtype=torch.int64, pin_memory=pin).view(-1, 2)
    return table.to(device, non_blocking=True)
