"""`make real`: its questions, and the seeds that its stored result collects. Nothing is trained here."""

import json
import random
import re

import pytest

from benchmarks.real import learning, questions
from benchmarks.report import Figure


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Questions and answers by split."""
    folder = tmp_path_factory.mktemp("questions")
    questions.write(folder)
    lines = {split: (folder / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")}
    return {split: [json.loads(line) for line in texts] for split, texts in lines.items()}


def sum_of(row):
    """Return the sum that a question asks for, read from its words."""
    question = row["prompt"][-1]["content"]
    a, b = map(int, re.findall(r"\d+", question))
    return ("-" if re.search(r"gives \d|loses|takes", question) else "+"), a, b


def test_answers_are_right_and_numbers_are_small(rows):
    for row in rows["train"] + rows["test"]:
        sign, a, b = sum_of(row)
        assert min(a, b) >= 1
        assert max(a, b) <= 10
        assert row["answer"] == f"#### {a + b if sign == '+' else a - b}"
        assert int(row["answer"][5:]) >= 1


def test_no_held_out_sum_is_in_the_training(rows):
    train, test = ({sum_of(row) for row in rows[split]} for split in ("train", "test"))
    assert not train & test
    # 100 sums and 45 differences of numbers up to 10, of which 15 % are held out.
    assert (len(train), len(test)) == (123, 22)


def test_every_question_is_asked_once_after_the_same_solved_ones(rows):
    asked = [row["prompt"][-1]["content"] for split in rows.values() for row in split]
    assert len(set(asked)) == len(asked) == 4096 + 256
    assert {json.dumps(row["prompt"][:-1]) for split in rows.values() for row in split} == {
        json.dumps(questions.conversation("")[:-1])
    }


def test_a_seed_makes_the_same_questions():
    sums = questions.all_sums()
    first, again, other = (questions.questions(sums, random.Random(seed)) for seed in (1, 1, 2))
    assert [next(first) for _ in range(20)] == [next(again) for _ in range(20)]
    assert next(first) != next(other)


def figures(minutes, before, after):
    """Return the figures of one seed."""
    return [
        Figure("rlcore", "whole command", "min", [minutes]),
        Figure("rlcore", f"{learning.ACCURACY}0", "share of samples", [before]),
        Figure("rlcore", f"{learning.ACCURACY}24", "share of samples", [after]),
    ]


def test_further_seeds_are_added_and_the_worst_decides(monkeypatch, tmp_path):
    from benchmarks import report

    for module in (report, learning):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert learning.write(figures(20, 0.1, 0.9))
    held = learning.write(learning.joined(learning.stored(), figures(21, 0.2, 0.6)))
    assert not held
    bars = {
        bar["name"]: (bar["value"], bar["holds"]) for bar in json.loads((tmp_path / "real.json").read_text())["bars"]
    }
    assert bars == {
        learning.BEFORE.name: (0.2, True),
        learning.AFTER.name: (0.6, False),
        learning.MINUTES.name: (21, True),
    }
    assert (tmp_path / "real.svg").read_text().count("<polyline") == 2
    assert [figure.runs for figure in learning.stored()] == [[20, 21], [0.1, 0.2], [0.9, 0.6]]


def test_a_seed_with_other_figures_is_refused():
    with pytest.raises(ValueError, match="begin anew"):
        learning.joined(figures(20, 0.1, 0.9), figures(20, 0.1, 0.9)[:2])
