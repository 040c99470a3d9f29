"""Noise by name in vLLM's second model runner, which is its own choice on a GPU since 0.29.

A request keeps its slot while it is in the batch; the rows of the logits name slots, in another order in each step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from rlcore.engines.vllm.noise import EXTRA, draw, next_noise, on_device


class RowNoise(LogitsProcessor):
    """Keeps each row's noise key and length of prompt on the device, by vLLM's slot; changes no logits."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._device = req_states.device
        self._slots = [(0, 0)] * req_states.max_num_reqs
        self._greedy = np.zeros(req_states.max_num_reqs, dtype=bool)
        self._changed = True

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """See LogitsProcessor. True, as vLLM then gives fp32 logits of its own, which a draw may overwrite."""
        # vLLM warms up with requests of its own, before rows are drawn by name.
        self._slots[req_idx] = (sampling_params.extra_args or {}).get(EXTRA, (0, 0))
        self._greedy[req_idx] = sampling_params.temperature == 0
        self._changed = True
        return True

    def apply_staged_writes(self) -> None:
        """See LogitsProcessor. Only a step with new rows copies anything to the device, and waits for no copy."""
        if self._changed:
            pin = self._device.type == "cuda"
            self._names = on_device(self._slots, self._device, pin=pin)
            self._greedy_on_device = torch.tensor(self._greedy, pin_memory=pin).to(self._device, non_blocking=True)
            self._changed = False

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """See LogitsProcessor."""
        return logits

    def draw(self, logits: Tensor, slots: Tensor, slots_on_host: np.ndarray, lengths: Tensor) -> Tensor:
        """Return tokens int64 [rows] from `logits` fp32 [rows, vocab], which it overwrites; greedy rows the likeliest.

        `slots` of the rows, on the device and on the host. `lengths` int [rows]: tokens that the rows have.
        """
        tokens, _ = draw(logits, next_noise(self._names[slots], lengths))
        if not self._greedy[slots_on_host].any():
            return tokens
        return torch.where(self._greedy_on_device[slots], logits.argmax(-1), tokens)


def install(runner: Any) -> None:
    """Have a runner draw tokens with RowNoise. Raises AttributeError for a sampler with other methods."""
    sampler = runner.sampler
    noise = next(each for each in sampler.logits_processors if isinstance(each, RowNoise))
    sampler.sample = partial(_sample, sampler.apply_sampling_params, noise)


def _sample(
    process: Any,
    noise: RowNoise,
    logits: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    slots_on_host: np.ndarray,
    positions: Tensor,
    *others: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return (tokens [rows], the logits that they were drawn from); see vLLM's Sampler.sample, which it replaces.

    vLLM computes log-probs from these logits, and so from their shifted values too. `positions` int [rows]: of the
    tokens that were fed last.
    """
    logits = process(logits, row_slots, slots, slots_on_host, positions, *others)
    return noise.draw(logits, row_slots, slots_on_host, positions + 1), logits
