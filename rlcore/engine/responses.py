"""Sampled responses, alike for every rollout engine: end tokens, stop strings, columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlcore.protocol import DataProto, Ragged


@dataclass
class Response:
    """The tokens of one response, their log-probs in nats, and whether it ended by itself."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a response: those of the model's generation config, else the tokenizer's."""
    ends = generation_config.eos_token_id if generation_config is not None else None
    ends = tokenizer.eos_token_id if ends is None else ends
    return [ends] if isinstance(ends, int) else list(ends or ())


def ends_with_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: Any) -> bool:
    """Return whether one of the stop strings stands in the last tokens of a response."""
    if not stop:
        return False
    # A character takes at most 4 byte-level tokens; one more for a token that begins before the stop string.
    tail = tokens[-(4 * max(len(text) for text in stop) + 1) :]
    text = tokenizer.decode(tail, skip_special_tokens=True)
    return any(s in text for s in stop)


def response_columns(rows: Sequence[Response], prompt_length: torch.Tensor, tokenizer: Any, version: int) -> DataProto:
    """Return the columns of RolloutEngine.generate for rows that weights of one version sampled."""
    responses = [torch.tensor(row.tokens, dtype=torch.int64) for row in rows]
    ragged = (
        Ragged.from_list(responses)
        if rows
        else Ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    )
    log_probs = torch.tensor([value for row in rows for value in row.log_probs], dtype=torch.float32)
    texts = np.empty(len(rows), dtype=object)
    texts[:] = [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows]
    return DataProto.from_single_dict(
        {
            "responses": ragged,
            "response_mask": ragged.with_values(torch.ones_like(ragged.values)),
            "rollout_log_probs": ragged.with_values(log_probs),
            "response_text": texts,
            "prompt_length": prompt_length,
            "response_length": ragged.lengths,
            "finished": torch.tensor([row.finished for row in rows], dtype=torch.bool),
            "weights_version": torch.full((len(rows),), version, dtype=torch.int64),
        }
    )
