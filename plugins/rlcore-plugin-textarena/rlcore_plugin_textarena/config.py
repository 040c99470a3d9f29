"""The keys `env.textarena.*` and `data.textarena.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlcore import option


@dataclass(frozen=True)
class GameConfig:
    """The game, and who plays it."""

    game: str = option("TicTacToe-v0", "id of the game in textarena")
    options: dict[str, Any] = option({}, "parameters of the game, as {max_turns: 10}")
    players: int = option(0, "players; 0: the fewest that the game allows", min=0)
    opponent: Literal["self", "random"] = option(
        "self",
        "the other players. self: the policy has all seats; random: the policy has one seat, which the seed chooses, "
        "and the others make a random valid move of those that the game's texts name",
    )
    brackets: bool = option(True, "put [ ] around an answer without brackets, as most games want their moves")


@dataclass(frozen=True)
class SeedsConfig:
    """The rows of the data set: seeds of games."""

    size: int = option(1000, "training rows", min=1)
    eval_size: int = option(100, "held-out rows; data.eval_size of them are evaluated", min=1)
    seed: int = option(0, "seed of the seeds", min=0)
