"""Noise by name in vLLM's first model runner, which vLLM deprecates since 0.29."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, apply_top_k_top_p_pytorch

from rlcore.engines.vllm.noise import EXTRA, draw, next_noise, on_device


class RowNoise(LogitsProcessor):
    """Keeps each row's noise key and length of prompt on the device, by vLLM's batch index; changes no logits."""

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
        process_dict_updates(self._rows, batch_update, lambda params, _, __: params.extra_args[EXTRA])
        known = [self._rows[index] for index in range(batch_update.batch_size)]
        self._on_device = on_device(known, self._device, pin=self._pin)

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor."""
        return logits

    def next(self, lengths: Tensor) -> Tensor:
        """Return `next_noise` of the first rows of the batch, as many as `lengths`."""
        return next_noise(self._on_device[: len(lengths)], lengths)


def install(runner: Any) -> None:
    """Have a runner draw tokens with RowNoise, in one pass over the batch, instead of a generator for each row."""
    processors = runner.input_batch.logitsprocs.argmax_invariant
    noise = next(each for each in processors if isinstance(each, RowNoise))
    runner.sampler.topk_topp_sampler.forward = partial(_sample, runner, noise)
    runner.sampler.gather_logprobs = _as_gathered


def _sample(
    runner: Any, noise: RowNoise, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (tokens [rows], their log-probs [rows, 1]); see vLLM's TopKTopPSampler, whose log-probs are of all tokens.

    `runner.seq_lens` has the tokens of each row on the device, with those of this step.
    """
    # Where Triton is installed, the first takes Triton's kernel on a CPU too, and fails in it.
    cut = apply_top_k_top_p_pytorch if logits.device.type == "cpu" else apply_top_k_top_p
    tokens, log_probs = draw(cut(logits, k, p), noise.next(runner.seq_lens[: len(logits)]))
    return tokens, log_probs[:, None]


def _as_gathered(log_probs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Return the log-probs of `_sample` in vLLM's form; see its Sampler.gather_logprobs. Nothing reads the ranks."""
    ranks = torch.zeros_like(token_ids, dtype=torch.int32)
    return LogprobsTensors(token_ids[:, None].to(torch.int32), log_probs, ranks)
