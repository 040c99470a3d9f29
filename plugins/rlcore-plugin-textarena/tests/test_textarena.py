"""Games of textarena, played by the contract of environments, and trained on."""

import json
import re
from pathlib import Path

import pytest
from rlcore_plugin_textarena.config import GameConfig, SeedsConfig
from rlcore_plugin_textarena.environment import environment_class
from rlcore_plugin_textarena.games import DOWNLOADS, check, players_of
from rlcore_plugin_textarena.seeds import load

from rlcore import ConfigError
from rlcore.config import compose
from rlcore.config.schema import DataConfig
from rlcore.episodes.processes import EnvironmentPool, pack
from rlcore.plugins import PluginManager


def begin(seed=0, **settings):
    config = GameConfig(**settings)
    check(config)
    game = environment_class(config)(config)
    return game, game.reset(seed)


def play(moves, seed=0, **settings):
    """Play the moves of the policy; return the game and everything that it answered."""
    game, first = begin(seed, **settings)
    return game, [first, *(game.step([{"role": "assistant", "content": move}]) for move in moves)]


def text(observation):
    return observation.messages[0]["content"]


def test_self_play_has_a_seat_for_each_player():
    game, seen = play(["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert type(game).seats == 2
    assert [each.seat for each in seen[:5]] == [0, 1, 0, 1, 0]
    assert "You are Player 0" in text(seen[0])
    assert "You are Player 1" in text(seen[1])
    assert "[Player 0] [0]" in text(seen[1])
    assert "You are Player" not in text(seen[2])  # a conversation has the rules once
    assert seen[5].done
    assert game.score() == [1.0, -1.0]


def test_the_player_does_not_read_its_own_moves_again():
    _, seen = play(["[0]", "[3]"])
    assert "[Player 0]" not in text(seen[2])


def test_a_move_without_brackets():
    game, _ = play(["0", "3", "1", "4", "2"])
    assert game.score() == [1.0, -1.0]
    game, seen = play(["0"], brackets=False)
    assert "invalid move" in text(seen[1])


def test_the_game_decides_about_invalid_moves():
    game, seen = play(["[0]", "[0]", "[0]"])
    assert seen[2].seat == 1
    assert "invalid move" in text(seen[2])
    assert seen[3].done
    assert game.score() == [1.0, -1.0]


def test_an_unfinished_game_has_no_winner():
    game, _ = play(["[0]", "[3]", "[1]"])
    assert game.score() == [0.0, 0.0]


def test_a_game_for_one():
    game, seen = play(["[1]", "[2]"], game="GuessTheNumber-v0")
    assert type(game).seats == 1
    assert {each.seat for each in seen} == {0}
    assert game.score() == [0.0]


def test_the_seed_fixes_the_game():
    for settings in ({"game": "Minesweeper-v0-small"}, {"game": "KuhnPoker-v0-short", "opponent": "random"}):
        first, again, other = (
            [each.messages for each in play(["[0 0]", "[check]", "[1 1]"][:2], seed, **settings)[1]]
            for seed in (5, 5, 6)
        )
        assert first == again
        assert first != other


def test_a_random_opponent_plays_valid_moves_on_both_sides():
    sides = set()
    for seed in range(6):
        game, observation = begin(seed, opponent="random")
        assert type(game).seats == 1
        sides.add(re.search(r"You are Player (\d)", text(observation)).group(1))
        while not observation.done:
            free = re.findall(r"\[\d\]", text(observation).rpartition("Available")[2])
            observation = game.step([{"role": "assistant", "content": free[0]}])
        assert game.score()[0] in (-1.0, 0.0, 1.0)
        assert "Invalid" not in str(game._game.state.game_info)
    assert sides == {"0", "1"}


def test_players():
    assert [players_of(GameConfig(game=name)) for name in ("Bandit-v0", "Nim-v0", "ThreePlayerIPD-v0")] == [1, 2, 3]
    assert environment_class(GameConfig(game="LiarsDice-v0", players=4)).seats == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"game": "Tic"}, "'Tic' is not a game of textarena; there are 2048-v0"),
        ({"game": "Wordle-v0"}, "Wordle-v0 downloads word lists"),
        ({"game": "Debate-v0"}, "asks a language model behind an API"),
        ({"players": 3}, "cannot start with players=3"),
        ({"options": {"size": 4}}, "starts with no number of players.* unexpected keyword argument 'size'"),
        ({"game": "Nim-v0", "opponent": "random"}, "Nim-v0 does not name its moves"),
        ({"game": "Bandit-v0", "opponent": "random"}, "Bandit-v0 has one player"),
    ],
)
def test_games_that_cannot_be_played(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(GameConfig(**settings))


def test_word_games_are_nine():
    assert len(DOWNLOADS) == 9


def test_no_seed_is_in_both_splits():
    own = SeedsConfig(size=50, eval_size=10)
    train, held_out = (load(DataConfig(), split, own) for split in ("train", "eval"))
    seeds = [{row["game_seed"] for row in each} for each in (train, held_out)]
    assert [len(each) for each in seeds] == [50, 10]
    assert not seeds[0] & seeds[1]
    assert load(DataConfig(), "train", own) == train


def run(plugins, folder: Path, *overrides: str) -> list[dict[str, float]]:
    from rlcore.training.trainer import train

    given = ["experiment=quickstart", "tracker=none", "cluster=in_process", "data=textarena", "env=textarena"]
    small = ["data.batch_size=2", "algo.group_size=4", "env.turn_len=4", "rollout.response_len=1200"]
    fast = ["trainer.total_steps=2", "trainer.eval_every=0", "env.concurrency=2", f"run.dir={folder}"]
    train(compose([*given, *small, *fast, "data.prompt_len=1024", *overrides], plugins), plugins)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("overrides", [["env.textarena.opponent=random"], ["env.textarena.game=GuessTheNumber-v0"]])
def test_grpo_plays(tmp_path, overrides):
    lines = run(PluginManager.load(), tmp_path / "run", *overrides)
    assert [line["reward/errors"] for line in lines if "reward/errors" in line] == [0, 0]


def test_grpo_plays_against_itself(tmp_path):
    game = ["env.textarena.game=TruthAndDeception-v0", "env.textarena.options={max_turns: 4}"]  # takes any text
    lines = run(PluginManager.load(), tmp_path / "run", *game)
    assert [line["reward/errors"] for line in lines if "reward/errors" in line] == [0, 0]
    # Each game is won by one seat and lost by the other, and both are rows: the mean is 0.
    trained = [line for line in lines if "reward/mean" in line]
    assert [(line["reward/mean"], line["reward/std"]) for line in trained] == [(0.0, 1.0)] * 2


def test_two_seats_through_a_process():
    config = GameConfig()
    pool = EnvironmentPool(
        pack("textarena", environment_class(config), config, imports=["textarena"]),
        processes=1,
        timeout=30.0,
        memory_mb=2048,
    )

    def answer():
        while not (found := pool.poll(1.0)):
            pass
        assert isinstance(found[0][1], dict), found
        return found[0][1]

    pool.start()
    try:
        pool.reset("a", {"game_seed": 3, "prompt": "game 3"}, 0)
        seats = [answer()["seat"]]
        for move in "03142":
            pool.turn("a", {"role": "assistant", "content": move}, [])
            seats.append((last := answer())["seat"])
    finally:
        pool.close()
    assert seats[:5] == [0, 1, 0, 1, 0]
    assert (last["done"], last["scores"]) == (True, [1.0, -1.0])
