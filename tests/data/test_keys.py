"""Reference answers: where a row has them, and rows that have none. Under a second."""

import math

import pytest

from rlcore.config.schema import DataConfig
from rlcore.data.files import load
from rlcore.data.keys import answer_fault, nearest, value_at
from rlcore.errors import DataError
from rlcore.rewards.arithmetic import arithmetic
from rlcore.rewards.gsm8k import gsm8k, gsm8k_flexible
from rlcore.rewards.math import math as math_reward

VERL = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}


def test_a_key_with_dots_is_a_path_unless_a_column_has_that_name():
    assert value_at(VERL, "reward_model.ground_truth") == "2"
    assert value_at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert value_at({"a": {"b": {"c": 3}}}, "a.b.c") == 3
    for key in ("answer", "reward_model.truth", "prompt.text", "reward_model.ground_truth.x"):
        assert value_at(VERL, key) is None


def test_a_suggestion_is_a_value_and_no_object():
    assert nearest(VERL, "ground_truth") == " Did you mean 'reward_model.ground_truth'?"
    assert nearest(VERL, "reward_model") != " Did you mean 'reward_model'?"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "p"}, "there is nothing in column 'answer'; its columns are prompt."),
        ({"prompt": "p", "answer": None}, "there is nothing in column 'answer'"),
        ({"prompt": "p", "answer": math.nan}, "column 'answer' holds NaN"),
        ({"prompt": "p", "answer": {"value": 3}}, "column 'answer' holds an object with value"),
        (VERL, "with the answers, as data.answer_key=reward_model.ground_truth"),
        ({"prompt": "p", "solution": "$2$"}, "with the answers, as data.answer_key=solution"),
    ],
)
def test_what_is_no_reference_answer(row, says):
    assert says in answer_fault(row, "answer")


@pytest.mark.parametrize("answer", ["2", "", 0, 2.5, ["2", "3"], [{"stdin": "", "stdout": ""}], False])
def test_what_is_one(answer):
    assert answer_fault({"answer": answer}, "answer") is None


@pytest.mark.parametrize("reward", [arithmetic, gsm8k, gsm8k_flexible, math_reward])
@pytest.mark.parametrize("answer", [None, math.nan, {"ground_truth": "2"}])
def test_a_reward_that_compares_has_no_score_without_an_answer(reward, answer):
    with pytest.raises(ValueError, match="the row has no reference answer"):
        reward("1+1=", "2", answer)


def test_both_keys_may_be_paths(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(f'{{"q": {{"text": "{i}+1="}}, "reward_model": {{"ground_truth": "{i + 1}"}}}}\n' for i in range(20))
    )
    config = DataConfig(name="file", path=str(path), prompt_key="q.text", answer_key="reward_model.ground_truth")
    assert len(load(config, "train")) + len(load(config, "eval")) == 20
    with pytest.raises(DataError, match=r"nothing in column 'q.txt'.*data\.prompt_key.*Did you mean 'q\.text'\?"):
        load(DataConfig(name="file", path=str(path), prompt_key="q.txt"), "train")
