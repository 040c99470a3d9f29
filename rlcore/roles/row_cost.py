"""The cost of a row for a transformer, which balances rows over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.config import ModelConfig
from rlcore.model_folder import load_model_config
from rlcore.protocol import DataProto

LENGTHS = ("prompt_length", "response_length")
"""Columns with the number of tokens of a row's prompt and response."""


def batch_costs(batch: DataProto, ranks: int, model: ModelConfig) -> list[int] | None:
    """Return the cost of each row for a model; None for a single rank or a batch without the columns LENGTHS.

    These columns are small, and arrived at the controller with their call's reply, so nothing is fetched.
    """
    if ranks == 1 or any(name not in batch for name in LENGTHS):
        return None
    prompts, responses = (batch.view(name) for name in LENGTHS)
    return row_costs((prompts + responses).tolist(), hidden_size(model))


def row_costs(lengths: Sequence[int], hidden: int) -> list[int]:
    """Return the cost of rows of these lengths, in tokens, for a model of width `hidden`; the unit is arbitrary.

    A layer of width d takes about 24 d^2 n floating-point operations for the matrices of n tokens, and 2 d n^2 for
    their causal attention (Kaplan et al., arXiv 2001.08361, section 2.1, with 12 d^2 parameters a layer). Divided by
    2 d that is n (12 d + n), for any number of layers; a backward pass takes twice as much of both.
    """
    return [length * (12 * hidden + length) for length in lengths]


def hidden_size(model: ModelConfig) -> int:
    """Return the width of a model's layers. Reads its config.json only, once."""
    return int(load_model_config(model.path, model.trust_remote_code).get_text_config().hidden_size)
