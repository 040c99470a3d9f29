"""Batches that keep some rows of another: their union keeps these rows alone. Under a second."""

import pytest
import torch

from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged


def rows(*numbers, name="row"):
    return DataProto.from_dict({name: torch.tensor(numbers)})


MASK = torch.tensor([True, False, True, True])


def test_a_union_keeps_the_rows_that_one_side_keeps():
    batch = rows(0, 1, 2, 3)
    batch["tokens"] = Ragged.from_list([[0], [1, 1], [2, 2, 2], []], dtype=torch.int64)
    batch["name"] = ["a", "b", "c", "d"]
    scores = rows(10, 11, 12, 13, name="score").keeping(MASK)
    assert scores["score"].tolist() == [10, 12, 13]
    for joined in (batch.union(scores), scores.union(batch)):
        assert joined["row"].tolist() == [0, 2, 3]
        assert joined["score"].tolist() == [10, 12, 13]
        assert joined["tokens"].lengths.tolist() == [1, 3, 0]
        assert joined["name"].tolist() == ["a", "c", "d"]
    assert batch["row"].tolist() == [0, 1, 2, 3]


def test_the_union_knows_its_rows_too():
    """A column of all rows that arrives later, and one of the rows that were kept, both fit."""
    joined = rows(0, 1, 2, 3).union(rows(10, 11, 12, 13, name="score").keeping(MASK))
    assert joined.union(rows(4, 5, 6, 7, name="late"))["late"].tolist() == [4, 6, 7]
    assert joined.union(rows(4, 6, 7, name="late"))["late"].tolist() == [4, 6, 7]


def test_two_that_keep_other_rows_keep_those_of_both():
    one = rows(0, 1, 2, 3, name="one").keeping(MASK)
    other = rows(0, 1, 2, 3, name="other").keeping(torch.tensor([True, True, False, True]))
    joined = one.union(other)
    assert joined["one"].tolist() == joined["other"].tolist() == [0, 3]
    assert rows(5, 6, 7, 8).union(joined)["row"].tolist() == [5, 8]


def test_one_after_the_other():
    first = rows(0, 1, 2, 3).union(rows(0, 1, 2, 3, name="one").keeping(MASK))
    second = first.union(rows(0, 2, 3, name="two").keeping(torch.tensor([False, True, True])))
    assert second["row"].tolist() == second["two"].tolist() == [2, 3]
    assert rows(4, 5, 6, 7, name="all").union(second)["all"].tolist() == [6, 7]


@pytest.mark.parametrize(
    "same", [lambda b: b[:], lambda b: b.select(["score"]), lambda b: b.rename("score", "s"), lambda b: b.to("cpu")]
)
def test_operations_that_leave_the_rows_keep_the_knowledge(same):
    scores = same(rows(10, 11, 12, 13, name="score").keeping(MASK))
    assert rows(0, 1, 2, 3).union(scores)["row"].tolist() == [0, 2, 3]


def test_all_rows_kept_is_an_ordinary_batch():
    scores = rows(10, 11, 12, 13, name="score").keeping(torch.ones(4, dtype=torch.bool))
    assert (
        rows(0, 1, 2, 3)
        .union(scores)
        .equal(DataProto.from_dict({"row": torch.arange(4), "score": torch.arange(10, 14)}))
    )


def test_other_row_counts_are_still_an_error():
    scores = rows(10, 11, 12, 13, name="score").keeping(MASK)
    with pytest.raises(DataError, match="5 and 3 rows"):
        rows(0, 1, 2, 3, 4).union(scores)
    with pytest.raises(DataError, match="4 and 2 rows"):
        rows(0, 1, 2, 3).union(scores[[0, 1]])
    with pytest.raises(DataError, match="has 3 rows, but the batch has 4"):
        rows(0, 1, 2, 3)["score"] = scores["score"]


def test_none_kept():
    joined = rows(0, 1, 2, 3).union(rows(0, 1, 2, 3, name="score").keeping(torch.zeros(4, dtype=torch.bool)))
    assert len(joined) == 0


def test_objects_that_contain_themselves_are_refused_and_not_compared_for_ever():
    ring: list = []
    ring.append(ring)
    other: list = []
    other.append(other)
    with pytest.raises(DataError, match="they contain themselves or nest too deeply"):
        DataProto.from_dict({}, {"x": [ring]}).union(DataProto.from_dict({}, {"x": [other]}))
