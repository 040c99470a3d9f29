"""What every side moves: the rows of a step, made with numpy alone so that each venv makes the same."""

from __future__ import annotations

import numpy as np

ROWS = 3840
"""Divisible by 2, 3, 4 and 5, as verl cuts only into equal parts."""
LONGEST = 4096
DENSE_WIDTH = 512
PER_TOKEN = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "advantages", "returns")

Column = tuple[np.ndarray, np.ndarray | None]
"""The values, and of a ragged column each row's length."""


def rows_of(producer: int, producers: int, megabytes: float) -> dict[str, Column]:
    """Return a producer's share of the rows: ragged int64 tokens, ragged fp32 numbers a token, and dense columns.

    All shares together are `megabytes` MiB of values. Responses have a
    long tail, as sampled ones do.
    """
    random = np.random.default_rng(0)
    prompts = random.integers(16, 257, ROWS)
    shape = random.beta(0.9, 1.8, ROWS)
    dense_bytes = ROWS * (DENSE_WIDTH * 4 + 4 + 8)
    token_bytes = 8 + 4 * len(PER_TOKEN)
    wanted = (megabytes * 2**20 - dense_bytes - 8 * int(prompts.sum())) / token_bytes
    responses = np.clip(np.rint(shape * (wanted / shape.sum())), 1, LONGEST).astype(np.int64)
    mine = slice(producer * ROWS // producers, (producer + 1) * ROWS // producers)
    random = np.random.default_rng(1 + producer)
    return _columns(random, prompts[mine], responses[mine], DENSE_WIDTH)


def small_rows(rows: int = 64) -> dict[str, Column]:
    """Return the six columns of a small batch: prompts, responses, two ragged fp32 columns and two dense ones."""
    random = np.random.default_rng(0)
    columns = _columns(random, random.integers(8, 17, rows), random.integers(4, 17, rows), 1)
    return {name: columns[name] for name in ("prompts", "responses", *PER_TOKEN[:2], "scores", "sample_index")}


def _columns(random: np.random.Generator, prompts: np.ndarray, responses: np.ndarray, width: int) -> dict[str, Column]:
    rows, tokens = len(prompts), int(responses.sum())
    columns: dict[str, Column] = {
        "prompts": (random.integers(0, 150_000, int(prompts.sum())), prompts),
        "responses": (random.integers(0, 150_000, tokens), responses),
    }
    # Small whole numbers: their sums are the same in any order, so that the sides can be compared exactly.
    for name in PER_TOKEN:
        columns[name] = (random.integers(-4, 5, tokens).astype(np.float32), responses)
    columns["features"] = (random.integers(-4, 5, (rows, width)).astype(np.float32), None)
    columns["scores"] = (random.integers(0, 2, rows).astype(np.float32), None)
    columns["sample_index"] = (np.arange(rows), None)
    return columns


def nbytes(columns: dict[str, Column]) -> int:
    """Return the bytes of the values."""
    return sum(values.nbytes for values, _ in columns.values())
