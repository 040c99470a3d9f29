"""The rows of episodes: one for each branch, with the columns of `generate` and those of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlcore.episodes.conversation import Conversation
from rlcore.protocol import DataProto, Ragged


@dataclass
class EpisodeRow:
    """One branch of an episode.

    `row`: of the batch that asked for the episode. `branch`: its number among the episode's. `seat`: the player of an
    environment with several seats. `stop_reason`: as in docs/glossary.md, or "failed". `error`: None, or
    cause, traceback and attempts of a failed episode, whose conversation is empty.
    """

    row: int
    branch: int
    conversation: Conversation
    stop_reason: str
    tool_calls: int = 0
    tool_errors: int = 0
    score: float | None = None
    seat: int = 0
    error: dict[str, Any] | None = field(default=None)


def episode_columns(rows: Sequence[EpisodeRow], tokenizer: Any) -> DataProto:
    """Return the columns of the branches, one row each, all but `episode_row`; see docs/glossary.md.

    `response_text` is the text of the last turn: the answer. `weights_version` is that of the oldest sampled token.
    """
    conversations = [each.conversation for each in rows]
    spans = [each.spans for each in conversations]
    responses = [[token for span in own for token in span.tokens] for own in spans]
    mask = [[int(span.is_sampled) for span in own for _ in span.tokens] for own in spans]
    log_probs = [[value for span in own for value in span.log_probs or [0.0] * len(span.tokens)] for own in spans]
    turns = [each.sampled for each in conversations]
    ragged = _ragged(responses, torch.int64)
    last = [torch.tensor(own[-1].tokens if own else (), dtype=torch.int64) for own in turns]
    columns: dict[str, Any] = {
        "prompts": _ragged([each.prompt for each in conversations], torch.int64),
        "responses": ragged,
        "response_mask": _ragged(mask, torch.int64),
        "rollout_log_probs": _ragged(log_probs, torch.float32),
        "response_text": _objects([tokenizer.decode(tokens, skip_special_tokens=True) for tokens in last]),
        "prompt_length": torch.tensor([len(each.prompt) for each in conversations], dtype=torch.int64),
        "response_length": ragged.lengths,
        "finished": torch.tensor([each.stop_reason in ("end", "done") for each in rows], dtype=torch.bool),
        "weights_version": torch.tensor(
            [min((span.version for span in own), default=-1) for own in turns], dtype=torch.int64
        ),
        "turns": torch.tensor([len(own) for own in turns], dtype=torch.int64),
        "turn_ends": _ragged([_turn_ends(each) for each in conversations], torch.int64),
        "turn_rewards": _ragged([[span.reward for span in own] for own in turns], torch.float32),
        "tool_calls": torch.tensor([each.tool_calls for each in rows], dtype=torch.int64),
        "tool_errors": torch.tensor([each.tool_errors for each in rows], dtype=torch.int64),
        "stop_reason": _objects([each.stop_reason for each in rows]),
        "branch": torch.tensor([each.branch for each in rows], dtype=torch.int64),
        "seat": torch.tensor([each.seat for each in rows], dtype=torch.int64),
        "episode_messages": _objects([each.messages[each.asked :] for each in conversations]),
        "episode_score": _objects([each.score for each in rows]),
        "episode_error": _objects([each.error for each in rows]),
    }
    return DataProto.from_single_dict(columns)


def _turn_ends(conversation: Conversation) -> list[int]:
    """Return the number of response tokens up to the end of each turn of the policy."""
    ends, length = [], 0
    for span in conversation.spans:
        length += len(span.tokens)
        if span.is_sampled:
            ends.append(length)
    return ends


def _ragged(rows: Sequence[Sequence[int | float]], dtype: torch.dtype) -> Ragged:
    return Ragged.from_list([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):  # numpy would spread equally long lists over a second axis
        column[at] = value
    return column
