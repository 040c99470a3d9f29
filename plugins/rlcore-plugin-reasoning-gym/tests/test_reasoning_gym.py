"""The data set, the reward and the environment of reasoning-gym, with its real generators and verifiers."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rlcore_plugin_reasoning_gym import generate
from rlcore_plugin_reasoning_gym.config import AttemptsConfig, TasksConfig
from rlcore_plugin_reasoning_gym.entries import from_json
from rlcore_plugin_reasoning_gym.environment import WRONG, ReasoningGym
from rlcore_plugin_reasoning_gym.rows import load
from rlcore_plugin_reasoning_gym.verify import answer_in, score, verify

from rlcore import DataError
from rlcore.config import compose
from rlcore.config.schema import DataConfig
from rlcore.plugins import PluginManager

SUMS = {"chain_sum": 1.0}
UNSTABLE = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Tasks whose entries depend on PYTHONHASHSEED (knight_swap too, which takes seconds)."""


def rows(split="eval", **settings):
    """Make rows in this process, as the process that `load` starts does."""
    given = asdict(TasksConfig(**{"tasks": SUMS, "eval_size": 8, "size": 12, **settings}))
    return [
        {"prompt": each["question"], "answer": each["answer"], "reasoning_gym": json.loads(json.dumps(each["entry"]))}
        for each in generate.rows({**given, "split": split})
    ]


def right(row):
    return score(row["prompt"], row["answer"], row["answer"], row["reasoning_gym"])


@pytest.mark.timeout(200)
def test_rows_are_json_and_the_same_in_every_process():
    tasks = dict.fromkeys(UNSTABLE, 1.0)
    program = (
        "import json; from rlcore.config.schema import DataConfig; from rlcore_plugin_reasoning_gym.rows import load;"
        "from rlcore_plugin_reasoning_gym.config import TasksConfig;"
        f"print(json.dumps(load(DataConfig(), 'train', TasksConfig(tasks={tasks}, size=12))))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    made = json.loads(found.pop())
    assert {row["reasoning_gym"]["task"] for row in made} == set(UNSTABLE)
    assert [right(row) for row in made] == [1.0] * len(made)


def test_an_entry_is_reproducible_by_task_seed_and_index():
    import reasoning_gym

    for row in rows(options={"chain_sum": {"max_terms": 3}}):
        entry = row["reasoning_gym"]
        again = reasoning_gym.create_dataset(entry["task"], seed=entry["seed"], size=99, max_terms=3)[entry["index"]]
        assert (again["question"], again["answer"]) == (row["prompt"], row["answer"])
        assert from_json(entry["metadata"]) == again["metadata"]


def test_splits_and_seeds_give_other_questions():
    train, held_out, other = rows("train"), rows(), rows("train", seed=1)
    texts = [{row["prompt"] for row in each} for each in (train, held_out, other)]
    assert [len(each) for each in texts] == [12, 8, 12]
    assert not texts[0] & texts[1]
    assert not texts[0] & texts[2]


def test_weights_between_tasks():
    made = rows("train", tasks={"chain_sum": 3.0, "leg_counting": 1.0}, size=200)
    share = sum(row["reasoning_gym"]["task"] == "chain_sum" for row in made) / 200
    assert 0.65 < share < 0.85
    assert {right(row) for row in made} == {1.0}


def test_levels_rise_with_the_place_of_the_row():
    made = rows("train", levels=3, size=30)
    assert [row["reasoning_gym"]["level"] for row in made] == [0] * 10 + [1] * 10 + [2] * 10
    terms = [from_json(row["reasoning_gym"]["metadata"])["difficulty"]["num_terms"] for row in made]
    assert terms == [(2, 2)] * 10 + [(2, 3)] * 10 + [(2, 4)] * 10
    assert {right(row) for row in made} == {1.0}


def test_a_level_that_a_generator_refuses_is_the_highest_below():
    made = rows(tasks={"caesar_cipher": 1.0, "knights_knaves": 1.0, "aiw": 1.0, "gsm_symbolic": 1.0}, levels=4)
    assert {right(row) for row in made} == {1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": {"chain_sun": 1.0}}, "unknown task 'chain_sun'; there are ab, acre"),
        ({"tasks": {"chain_sum": 0.0}}, "the weight of 'chain_sum' is 0.0"),
        ({"options": {"gcd": {}}}, "options names \\['gcd'\\]"),
        ({"options": {"chain_sum": {"terms": 2}}}, "has no parameter 'terms'; it has min_terms"),
        ({"options": {"chain_sum": {"min_terms": 9}}}, "refuses {'min_terms': 9}: max_terms must be"),
    ],
)
def test_wrong_settings_name_themselves(settings, message):
    with pytest.raises(DataError, match=message):
        rows(**settings)


def test_the_process_that_makes_rows_says_why_it_cannot():
    with pytest.raises(DataError, match=r"data=reasoning_gym: .*unknown task 'chain_sun'"):
        load(DataConfig(), "train", TasksConfig(tasks={"chain_sun": 1.0}))


def test_where_the_answer_is():
    response = "thinking <answer> 1 </answer> no: <answer>\n2</answer>"
    assert [answer_in(response, form) for form in ("auto", "tagged")] == ["2", "2"]
    assert answer_in(response, "whole") == response
    assert [answer_in(" 3\n", form) for form in ("auto", "tagged", "whole")] == ["3", None, "3"]


def test_an_unreadable_answer_scores_zero_and_a_broken_entry_raises():
    row = rows(tasks={"prime_factorization": 1.0})[0]
    assert verify(row["reasoning_gym"], row["answer"], row["answer"]) == 1.0
    assert verify(row["reasoning_gym"], row["answer"], "abc") == 0.0  # the verifier itself raises ValueError
    with pytest.raises(ValueError, match="invalid literal"):
        verify(row["reasoning_gym"], "abc", "def")


@pytest.mark.parametrize("task", ["n_queens", "binary_matrix", "spiral_matrix", "string_insertion"])
def test_eval_runs_no_program(task, tmp_path):
    row = rows(tasks={task: 1.0}, eval_size=1)[0]
    target = tmp_path / "written"
    attack = f"[open({str(target)!r}, 'w').close()]"
    assert verify(row["reasoning_gym"], row["answer"], attack) < 1.0
    assert not target.exists()
    assert right(row) == 1.0


@pytest.mark.parametrize("task", ["countdown", "simple_integration", "polynomial_multiplication"])
def test_sympy_runs_no_program_and_no_giant_power(task, tmp_path):
    row = rows(tasks={task: 1.0}, eval_size=1)[0]
    target = tmp_path / "written"
    attack = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for answer in (attack, "9**9**9**9", "9**(9**9)", "2**99999999"):
        assert verify(row["reasoning_gym"], row["answer"], answer) == 0.0
    assert not target.exists()
    assert right(row) == 1.0


def test_attempts():
    row = rows()[0]
    game = ReasoningGym(AttemptsConfig(attempts=3, discount=0.5))
    game.reset(row["reasoning_gym"], row["answer"])
    first = game.step([{"role": "assistant", "content": "12345678"}])
    assert (first.messages, first.done) == (WRONG, False)
    second = game.step([{"role": "assistant", "content": row["answer"]}])
    assert (second.messages, second.reward, second.done) == (None, 1.0, True)
    assert game.score() == 0.5


def test_the_last_attempt_ends_the_episode():
    row = rows()[0]
    game = ReasoningGym(AttemptsConfig())
    game.reset(row["reasoning_gym"], row["answer"])
    assert game.step([{"role": "assistant", "content": "12345678"}]).done
    assert game.score() == game.score() < 1.0


@pytest.fixture
def plugins():
    return PluginManager.load()


def test_keys(plugins):
    overrides = ["algo=grpo", "data=reasoning_gym", "data.reasoning_gym.tasks={chain_sum: 2}", "run.dir=x"]
    config = compose([*overrides, "env=reasoning_gym", "env.reasoning_gym.attempts=2"], plugins)
    assert config.section(TasksConfig).tasks == {"chain_sum": 2.0}
    assert config.section(AttemptsConfig).attempts == 2
    assert len(plugins.datasets()["reasoning_gym"].bound(config).load(config.data, "eval")) == 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize("environment", [False, True])
def test_grpo_trains_on_it(plugins, tmp_path: Path, environment):
    from rlcore.training.trainer import train

    given = ["env=reasoning_gym", "env.reasoning_gym.attempts=2"] if environment else []
    config = compose(
        [
            "experiment=quickstart",
            "tracker=none",
            "cluster=in_process",
            "data=reasoning_gym",
            "data.reasoning_gym.tasks={chain_sum: 1.0}",
            "data.reasoning_gym.eval_size=8",
            "data.prompt_len=200",
            "rollout.response_len=64",
            "env.turn_len=8" if environment else "trainer.seed=0",
            "trainer.total_steps=2",
            f"run.dir={tmp_path / 'run'}",
            *given,
        ],
        plugins,
    )
    train(config, plugins)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0.0 <= summary["accuracy_after"] <= 1.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/errors"] for line in lines if "reward/errors" in line] == [0, 0]
