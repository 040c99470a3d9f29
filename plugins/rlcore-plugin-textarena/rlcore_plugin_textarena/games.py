"""The games: making one, the number of its players, and those that cannot be played here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from rlcore import ConfigError
from rlcore_plugin_textarena.config import GameConfig

RAW = "-raw"
"""Suffix of a game without textarena's wrappers, which repeat the whole history in each observation."""
DOWNLOADS = (
    "Codenames",
    "DontSayIt",
    "Hangman",
    "LetterAuction",
    "SpellingBee",
    "WordChains",
    "WordLadder",
    "WordSearch",
    "Wordle",
)
"""Games that download word lists while they are made."""
JUDGED = ("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions")
"""Games that ask a language model of OpenRouter."""
NAME_MOVES = (
    "Crusade",
    "GameOfPureStrategy",
    "HighSociety",
    "IndianPoker",
    "IteratedMatchingPennies",
    "IteratedPrisonersDilemma",
    "IteratedRockPaperScissors",
    "IteratedUltimatumGame",
    "KuhnPoker",
    "LiarsDice",
    "MarketEntryGame",
    "MemoryGame",
    "Othello",
    "PigDice",
    "Poker",
    "PublicGoodsGame",
    "SettlersOfCatan",
    "SimpleBlindAuction",
    "SimpleNegotiation",
    "SimpleTak",
    "Snake",
    "Stratego",
    "ThreePlayerGOPS",
    "ThreePlayerIPD",
    "ThreePlayerTicTacToe",
    "TicTacToe",
    "WildTicTacToe",
)
"""Games whose texts name moves in brackets, enough for a random player to play to the end."""
MOST_PLAYERS = 15


def make(config: GameConfig, players: int, seed: int) -> Any:
    """Return a new game with this many players. `random` and numpy start from the seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    game = textarena.make(config.game + RAW, **config.options)
    game.reset(num_players=players, seed=seed)
    return game


def players_of(config: GameConfig) -> int:
    """Return the number of players: `players`, or the fewest that the game allows."""
    if config.players:
        return config.players
    state = random.getstate(), np.random.get_state()
    refused: Exception | None = None
    try:
        for players in range(1, MOST_PLAYERS + 1):
            try:
                game = make(config, players, 0)
            except Exception as error:  # games refuse a number of players by an assertion, or fail at it
                refused = refused or error
                continue
            # Games for several players may forget to refuse one.
            if players > 1 or isinstance(game.state, textarena.SinglePlayerState):
                return players
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
    raise ConfigError(
        f"env.textarena.game={config.game} with options={config.options} starts with no number of players up to "
        f"{MOST_PLAYERS}: {type(refused).__name__}: {refused}"
    ) from refused


def check(config: GameConfig) -> None:
    """Raise ConfigError for a game that cannot be played here, with the cause."""
    found = sorted(name.removesuffix(RAW) for name in ENV_REGISTRY if name.endswith(RAW))
    if config.game not in found:
        raise ConfigError(
            f"env.textarena.game={config.game!r} is not a game of textarena; there are {', '.join(found)}"
        )
    folder = str(ENV_REGISTRY[config.game].entry_point).split(".")[2]
    if folder in DOWNLOADS:
        raise ConfigError(
            f"env.textarena.game={config.game} downloads word lists, and rlcore downloads none. So do "
            f"{', '.join(DOWNLOADS)}; choose another game"
        )
    if folder in JUDGED:
        raise ConfigError(
            f"env.textarena.game={config.game} asks a language model behind an API. So do {', '.join(JUDGED)}; choose "
            "another game"
        )
    players = players_of(config)
    try:
        make(config, players, 0)
    except Exception as error:
        raise ConfigError(
            f"env.textarena.game={config.game} cannot start with players={config.players} and options="
            f"{config.options}: {type(error).__name__}: {error}"
        ) from error
    if config.opponent == "random" and players > 1 and folder not in NAME_MOVES:
        raise ConfigError(
            f"env.textarena.opponent=random: {config.game} does not name its moves. These games do: "
            f"{', '.join(NAME_MOVES)}; or use opponent=self"
        )
    if config.opponent == "random" and players == 1:
        raise ConfigError(f"env.textarena.game={config.game} has one player; leave out env.textarena.opponent=random")
