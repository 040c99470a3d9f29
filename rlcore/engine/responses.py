"""The shared parts of all rollout engines' responses: stop strings, and the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcore.end_tokens import special_tokens
from rlcore.protocol import DataProto, Ragged

if TYPE_CHECKING:
    from rlcore.engine.rollout import Finished


def stop_window(stop: Sequence[str]) -> int:
    """Return the number of last tokens that can contain a stop string just completed by the newest token.

    A character takes at most 4 byte-level tokens; one more for a token that begins before the stop string.
    """
    return 4 * max(map(len, stop), default=0) + 1


def ends_with_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: Any) -> bool:
    """Return whether the last tokens of a response contain one of the stop strings.

    Special tokens are no text, but for a stop string that contains the text of one.
    """
    if not stop:
        return False
    window = tokens[-stop_window(stop) :]
    text = tokenizer.decode(window, skip_special_tokens=True)
    special = _with_special_tokens(tokenizer, tuple(stop))
    if special:
        whole = tokenizer.decode(window, skip_special_tokens=False)
        return any(s in (whole if s in special else text) for s in stop)
    return any(s in text for s in stop)


@lru_cache(maxsize=64)
def _with_special_tokens(tokenizer: Any, stop: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stop strings that contain the text of a special token."""
    special = special_tokens(tokenizer).values()
    return tuple(s for s in stop if any(each in s for each in special))


def response_columns(rows: Sequence[Finished], prompt_length: torch.Tensor, tokenizer: Any) -> DataProto:
    """Return the columns of RolloutEngine.generate for finished rows; `prompt_length` is int64 [rows]."""
    responses = [torch.tensor(row.tokens, dtype=torch.int64) for row in rows]
    ragged = (
        Ragged.from_list(responses)
        if rows
        else Ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    )
    log_probs = torch.tensor([value for row in rows for value in row.log_probs], dtype=torch.float32)
    texts = np.empty(len(rows), dtype=object)
    # Tensors: transformers checks each number of a list, which takes longer than decoding it.
    texts[:] = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]
    return DataProto.from_single_dict(
        {
            "responses": ragged,
            "response_mask": ragged.with_values(torch.ones_like(ragged.values)),
            "rollout_log_probs": ragged.with_values(log_probs),
            "response_text": texts,
            "prompt_length": prompt_length,
            "response_length": ragged.lengths,
            "finished": torch.tensor([row.finished for row in rows], dtype=torch.bool),
            "weights_version": torch.tensor([row.weights_version for row in rows], dtype=torch.int64),
        }
    )
