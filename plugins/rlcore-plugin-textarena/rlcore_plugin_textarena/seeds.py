"""The rows of `data=textarena`: one for each seed. The game's own text replaces the prompt."""

from __future__ import annotations

import random
from typing import Any

from rlcore import DataConfig
from rlcore_plugin_textarena.config import SeedsConfig

SEEDS = 2**31


def load(config: DataConfig, split: str, own: SeedsConfig) -> list[dict[str, Any]]:
    """Return the rows of a split ("train" or "eval"), with the column `game_seed`; no seed is in both."""
    drawn = random.Random(f"textarena {own.seed}").sample(range(SEEDS), own.size + own.eval_size)
    chosen = drawn[own.eval_size :] if split == "train" else drawn[: own.eval_size]
    return [{config.prompt_key: f"game {seed}", "game_seed": seed} for seed in chosen]
