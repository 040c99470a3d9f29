"""The environment `textarena`."""

from __future__ import annotations

import copy
import random
import re
from typing import Any, ClassVar

import numpy as np
from textarena import GAME_ID, ObservationType

from rlcore.episodes import EnvironmentFailure, Observation
from rlcore_plugin_textarena.config import GameConfig
from rlcore_plugin_textarena.games import make, players_of

BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")


class TextArena:
    """One game. Each player that the policy has is a seat with a conversation of its own.

    A turn is the text of a move. A conversation has the game's rules, then what was new to the player at each of its
    turns. A game decides about invalid moves: most say so once, and end with a loss at the second. The scores are the
    game's rewards, 1 for a win and -1 for a loss in most; 0 for all in a game that did not end.
    """

    seats: ClassVar[int] = 1

    def __init__(self, config: GameConfig) -> None:
        self._config = config
        self._players = players_of(config)
        self._others = random.Random()
        self._moves: dict[int, list[str]] = {player: [] for player in range(self._players)}

    def reset(self, game_seed: int) -> Observation:
        """Begin the game of a seed; its text replaces the prompt."""
        self._game = make(self._config, self._players, game_seed)
        self._others.seed(game_seed)
        self._policy = list(range(self._players)) if self.seats > 1 else [game_seed % self._players]
        return self._next()

    def step(self, messages: list[dict[str, Any]]) -> Observation:
        """Make the policy's move, and those of random players until the policy's next turn."""
        move = messages[-1]["content"]
        if self._config.brackets and not BRACKETS.search(move):
            move = f"[{move.strip()}]"
        return Observation(done=True) if self._game.step(move)[0] else self._next()

    def score(self) -> list[float]:
        """Return the reward of each seat."""
        rewards = self._game.close()[0] if self._game.state.done else None
        return [0.0 if rewards is None else float(rewards.get(player, 0.0)) for player in self._policy]

    def _next(self) -> Observation:
        while True:
            player, seen = self._game.get_observation()
            text = self._text(player, seen)
            if player in self._policy:
                return Observation([{"role": "user", "content": text}], seat=self._policy.index(player))
            self._moves[player] += BRACKETS.findall(text)
            if self._game.step(self._random_move(player))[0]:
                return Observation(done=True)

    def _text(self, player: int, seen: Any) -> str:
        """Return what is new to a player, without its own moves."""
        roles, parts = self._game.state.role_mapping, []
        for sender, text, kind in seen:
            if sender == GAME_ID:
                parts.append(text)
            elif sender != player:
                parts.append(f"[{roles.get(sender, f'Player {sender}')}] {text}")
            elif kind != ObservationType.PLAYER_ACTION:
                parts.append(text)
        return "\n".join(part.strip("\n") for part in parts) or "Your turn."

    def _random_move(self, player: int) -> str:
        """Return a random move of those named to the player that the game accepts."""
        moves = list(dict.fromkeys(self._moves[player]))
        self._others.shuffle(moves)
        before = random.getstate(), np.random.get_state()
        try:
            for move in moves:
                if self._is_valid(player, move):
                    return move
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
        raise EnvironmentFailure(
            f"{self._config.game} named no valid move to the random player {player} in its texts; its bracketed words "
            f"are {moves[:10]}. Use env.textarena.opponent=self for this game"
        )

    def _is_valid(self, player: int, move: str) -> bool:
        trial = copy.deepcopy(self._game)
        state = trial.state
        admin = len([each for each in state.logs if "invalid move" in str(each[1]).lower()])
        trial.step(move)
        now = len([each for each in state.logs if "invalid move" in str(each[1]).lower()])
        return now == admin and not state.game_info[player].get("invalid_move", False)


def environment_class(config: GameConfig) -> type[TextArena]:
    """Return the environment's class with the seats that the policy has."""
    seats = players_of(config) if config.opponent == "self" else 1
    return TextArena if seats == 1 else type(f"TextArena{seats}", (TextArena,), {"seats": seats})
