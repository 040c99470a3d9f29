"""Runs over rows without reference answers: refused where a reward needs them, and only there. About 8 s."""

import json

import pytest

from rlcore.config import compose
from rlcore.errors import DataError
from rlcore.plugins import PluginManager
from rlcore.training.evaluate import evaluate
from rlcore.training.trainer import train

ROWS = [
    {"prompt": f"{i}+1=", "text": str(i + 1), "checked": {"style": "rule", "ground_truth": str(i + 1)}}
    for i in range(8)
]


@pytest.fixture
def rows_inside(tmp_path):
    """Train on rows that have their answers inside a column, as verl's, but under another name."""
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({**row, "split": split}) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[2:]))
    base = ["cluster=in_process", "tracker=none", "data=file", f"data.path={tmp_path}", "data.batch_size=2"]
    base += ["rollout.response_len=4", "trainer.total_steps=1", f"run.dir={tmp_path}/run"]

    def run(*overrides):
        plugins = PluginManager.load()
        return train(compose([*base, *overrides], plugins), plugins)

    run.base = base
    return run


GRPO = ["algo=grpo", "algo.group_size=2"]


@pytest.mark.parametrize("every", [0, 1])
def test_a_reward_that_needs_answers_refuses_rows_without_before_the_run(rows_inside, tmp_path, every):
    says = r"reward 'math' needs a reference answer.*as data\.answer_key=checked\.ground_truth"
    with pytest.raises(DataError, match=says):
        rows_inside(*GRPO, f"trainer.eval_every={every}")
    assert not (tmp_path / "run").exists()


def test_the_key_that_it_names_is_the_remedy(rows_inside):
    summary = rows_inside(*GRPO, "trainer.eval_every=1", "data.answer_key=checked.ground_truth")
    assert summary["status"] == "finished"


def test_a_reward_of_ones_own_may_do_without(rows_inside, tmp_path):
    (tmp_path / "brief.py").write_text("def score(prompt, response, answer):\n    return -float(len(response))\n")
    assert rows_inside(*GRPO, f"reward.path={tmp_path}/brief.py:score", "trainer.eval_every=1")["status"] == "finished"


def test_a_column_that_a_reward_takes_without_a_default_is_there_before_the_run(rows_inside, tmp_path):
    (tmp_path / "graded.py").write_text("def score(completions, ground_truth, grade):\n    return [0.0] * len(grade)\n")
    options = [*GRPO, f"reward.path={tmp_path}/graded.py:score", "trainer.eval_every=0"]
    with pytest.raises(DataError, match=r"split 'train': reward 'graded\.score' needs the column 'grade', which"):
        rows_inside(*options)
    assert not (tmp_path / "run").exists()


def test_an_algorithm_that_scores_nothing_needs_answers_for_evaluations_only(rows_inside):
    options = ["algo=sft", "algo.response_key=text"]
    assert rows_inside(*options, "trainer.eval_every=0")["status"] == "finished"
    with pytest.raises(DataError, match="split 'eval', row 1: reward 'math' needs a reference answer"):
        rows_inside(*options, "trainer.eval_every=1")


def test_an_evaluation_by_itself_refuses_them_too(rows_inside, tmp_path):
    plugins = PluginManager.load()
    with pytest.raises(DataError, match="split 'eval', row 1: reward 'math' needs a reference answer"):
        evaluate(tmp_path, compose([*rows_inside.base, *GRPO], plugins), plugins)
