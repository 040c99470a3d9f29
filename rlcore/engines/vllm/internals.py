"""rlcore's use of vLLM's internals: the noise of its samples, and the tokens of rows that have not ended.

Written for vLLM 0.32 (its first model runner, which `rollout.py` selects).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.engine import FinishReason
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from rlcore.engine.sampling import draw_tokens
from rlcore.ops import uniform_noise


class RowNoise(LogitsProcessor):
    """Tracks each row's noise key and the number of its next token, by vLLM's batch index; changes no logits.

    A request names its key and its first number in `SamplingParams.extra_args`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, tuple[int, int, Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """See LogitsProcessor. vLLM skips it for greedy batches."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See LogitsProcessor. The list of a row's output tokens is vLLM's own and grows with the row."""
        process_dict_updates(
            self._rows, batch_update, lambda params, _, output: (*params.extra_args["rlcore_noise"], output)
        )

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor."""
        return logits

    def next(self, rows: int) -> Tensor:
        """Return fp64 [rows] in [0, 1): the numbers of the next tokens, by batch index."""
        known = [self._rows[index] for index in range(rows)]
        keys = torch.tensor([key for key, _, _ in known], device=self._device)
        numbers = torch.tensor([first + len(output) for _, first, output in known], device=self._device)
        return uniform_noise(keys, numbers, 1)[:, 0]


def sample_by_name(worker: Any) -> None:
    """Have a vLLM worker draw tokens with RowNoise, in one pass over the batch, instead of a generator for each row."""
    runner = worker.model_runner
    processors = runner.input_batch.logitsprocs.argmax_invariant
    noise = next(each for each in processors if isinstance(each, RowNoise))
    runner.sampler.topk_topp_sampler.forward = partial(_sample, noise)


def _sample(
    noise: RowNoise, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (tokens [rows], log-probs [rows, vocab]) of the cut distributions; see vLLM's TopKTopPSampler."""
    log_probs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    return draw_tokens(log_probs, noise.next(len(logits))), log_probs


def output_so_far(engine: Any, internal_id: str) -> Any:
    """Return vLLM's CompletionOutput of a request as if it ended now."""
    state = engine.output_processor.request_states[internal_id]
    return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]


def tokens_so_far(engine: Any, internal_id: str) -> Sequence[int]:
    """Return the tokens of a request so far; the list is vLLM's own."""
    return engine.output_processor.request_states[internal_id].detokenizer.output_token_ids
