"""The sampler that replaces vLLM's: noise by name, for a whole batch at once and without waiting for the device.

A logits processor is vLLM's documented extension. The places where this one is installed are in `internals`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlcore.engine import block_size, draw_from_blocks
from rlcore.ops import uniform_noise


class RowNoise(LogitsProcessor):
    """Keeps each row's noise key and the length of its prompt on the device, by vLLM's batch index; changes no logits.

    A request names both in `SamplingParams.extra_args["rlcore_noise"]`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device, self._pin = device, is_pin_memory
        self._rows: dict[int, tuple[int, int]] = {}
        self._on_device = torch.empty(0, 2, dtype=torch.int64, device=device)

    def is_argmax_invariant(self) -> bool:
        """See LogitsProcessor. vLLM skips it for greedy batches."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See LogitsProcessor. Only a step whose rows changed copies anything to the device, and waits for no copy."""
        if batch_update is None:
            return
        process_dict_updates(self._rows, batch_update, lambda params, _, __: params.extra_args["rlcore_noise"])
        known = [self._rows[index] for index in range(batch_update.batch_size)]
        table = torch.tensor(known, dtype=torch.int64, pin_memory=self._pin).view(-1, 2)
        self._on_device = table.to(self._device, non_blocking=True)

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor."""
        return logits

    def next(self, lengths: Tensor) -> Tensor:
        """Return fp64 [rows] in [0, 1): the numbers of the next tokens of rows that have `lengths` int [rows] tokens.

        The number of a token is its index in the response. It needs no host: vLLM has the lengths on the device. A row
        within its prompt gets a number too; vLLM discards its token.
        """
        keys, prompts = self._on_device[: len(lengths)].unbind(1)
        return uniform_noise(keys, lengths - prompts, 1)[:, 0]


def draw(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [rows], log-probs fp32 [rows]) of one draw from each row of fp32 `logits` [rows, vocab].

    `noise` fp64 [rows] in [0, 1). Draws a block of neighbouring tokens and then one of them, so that no log_softmax and
    no cumulative sum over the vocabulary is written. Overwrites `logits`.
    """
    rows, vocabulary = logits.shape
    size = block_size(vocabulary)
    logits -= logits.amax(-1, keepdim=True)
    blocks = logits.reshape(rows, -1, size)

    def inside(block: Tensor) -> Tensor:
        return blocks.gather(1, block[:, :, None].expand(-1, 1, size)).squeeze(1)

    return draw_from_blocks(blocks.exp().sum(-1), noise, inside)
