from __future__ import annotations

from rlcore.config.schema import DataConfig
from rlcore.data.arithmetic import Problem, load, problems


def test_problems_and_their_answers() -> None:
    assert (Problem(17, "+", 25).prompt, Problem(17, "+", 25).result) == ("17+25=", 42)
    assert (Problem(42, "-", 17).prompt, Problem(42, "-", 17).result) == ("42-17=", 25)


def test_every_problem_is_in_exactly_one_split() -> None:
    train, held_out = problems("train"), problems("eval")
    # 100 x 100 sums, and one difference for each of the 100 * 101 / 2 pairs whose result is not negative.
    assert len({p.prompt for p in train + held_out}) == len(train) + len(held_out) == 10_000 + 5_050
    assert len(held_out) >= 512
    assert min(p.result for p in train + held_out) == 0


def test_no_pair_of_operands_is_in_both_splits_in_any_order() -> None:
    def pairs(split: str) -> set[frozenset[int]]:
        return {frozenset((p.left, p.right)) for p in problems(split)}

    assert not pairs("train") & pairs("eval")


def test_the_first_held_out_problems_are_a_mixture() -> None:
    first = problems("eval")[:256]
    assert 0.2 < sum(p.operator == "-" for p in first) / 256 < 0.5
    assert len({p.left // 10 for p in first}) == 10


def test_the_split_never_changes() -> None:
    # The shipped model has been trained on this split: a problem that moves has been seen.
    assert [p.prompt for p in problems("eval")[:4]] == ["46+62=", "82+18=", "13+63=", "81+66="]
    assert len(problems("eval")) == 954


def test_rows_have_the_configured_names() -> None:
    rows = load(DataConfig(prompt_key="question", answer_key="result"), "eval")
    assert (rows[0]["question"], rows[0]["result"]) == ("46+62=", "108")
    assert rows[0].keys() == {"question", "result", "chosen", "rejected", "completion", "label"}


def test_rows_have_right_and_wrong_responses() -> None:
    for row in load(DataConfig(), "train")[:200]:
        assert row["chosen"] == row["answer"]
        assert 1 <= int(row["rejected"]) - int(row["answer"]) <= 9
        assert row["completion"] == (row["chosen"] if row["label"] else row["rejected"])
    assert [row["label"] for row in load(DataConfig(), "train")[:4]] == [True, False, True, False]
