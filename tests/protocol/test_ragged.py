import pickle

import pytest
import torch

from rlcore.errors import DataError
from rlcore.protocol import Ragged


def ragged():
    return Ragged.from_list([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])])


def test_rows_by_hand():
    rows = ragged()
    assert len(rows) == 3
    assert rows.values.tolist() == [1, 2, 3]
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert rows.lengths.tolist() == [2, 0, 1]
    assert rows.dtype == torch.int64
    assert [row.tolist() for row in rows.to_list()] == [[1, 2], [], [3]]
    assert [row.tolist() for row in rows] == [[1, 2], [], [3]]
    assert rows[-1].tolist() == [3]
    assert rows[1:].offsets.tolist() == [0, 0, 1]
    assert rows[[2, 0, 2]].values.tolist() == [3, 1, 2, 3]
    assert rows[torch.tensor([True, False, True])].lengths.tolist() == [2, 1]
    assert Ragged.cat([rows, rows[:1]]).lengths.tolist() == [2, 0, 1, 2]
    assert rows.with_values(torch.tensor([0.1, 0.2, 0.3])).lengths.tolist() == [2, 0, 1]
    assert rows.map(lambda values: values * 2)[0].tolist() == [2, 4]


def test_padding_on_either_side():
    rows = ragged()
    assert rows.to_padded(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert rows.to_padded(-1, length=3, side="left").tolist() == [[-1, 1, 2], [-1, -1, -1], [-1, -1, 3]]
    for side in ("left", "right"):
        assert Ragged.from_padded(rows.to_padded(9, 4, side), rows.lengths, side).equal(rows)
    with pytest.raises(DataError, match="a row has 2 values, more than the width 1"):
        rows.to_padded(length=1)
    with pytest.raises(DataError, match="'left' or 'right', got 'top'"):
        rows.to_padded(side="top")


def test_rows_of_more_dimensions():
    rows = Ragged.from_list([torch.ones(2, 3), torch.zeros(1, 3)])
    assert rows.to_padded().shape == (2, 2, 3)
    assert rows[[1, 0]].values.sum(1).tolist() == [0, 3, 3]


def test_no_rows():
    none = Ragged.from_list([], dtype=torch.float32)
    assert len(none) == 0
    assert none.to_list() == []
    assert none.to_padded().shape == (0, 0)
    assert ragged()[[]].equal(Ragged.from_list([], dtype=torch.int64))
    with pytest.raises(DataError, match="pass dtype="):
        Ragged.from_list([])


def test_gradient_flows_through_selection_and_padding():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    Ragged(values, torch.tensor([0, 2, 3]))[[1, 1, 0]].to_padded().sum().backward()
    assert values.grad.tolist() == [1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.float8_e4m3fn, torch.int32])
def test_pickle_keeps_every_dtype(dtype):
    rows = Ragged.from_list([[1, 0], [1]], dtype=dtype)[1:]
    copy = pickle.loads(pickle.dumps(rows))
    assert copy.dtype == dtype
    assert copy.values.view(torch.uint8).tolist() == rows.values.view(torch.uint8).tolist()
    assert copy.offsets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ragged(torch.zeros(3), torch.tensor([0, 2])), "must rise from 0 to 3, the number of values"),
        (lambda: Ragged(torch.zeros(3), torch.tensor([0, 4, 3])), "rise from 0"),
        (lambda: Ragged(torch.zeros(3), torch.tensor([0, 3], dtype=torch.int32)), "offsets must be int64"),
        (lambda: Ragged(torch.tensor(1.0), torch.tensor([0])), "got a scalar"),
        (lambda: Ragged.from_list([torch.zeros(1), torch.zeros(1, 2)]), "one trailing shape"),
        (lambda: Ragged.from_list([torch.zeros(1), torch.zeros(1).long()]), "one dtype"),
        (lambda: Ragged.from_list([1, 2]), "tensors \\[length"),
        (lambda: Ragged.cat([]), "nothing to concatenate"),
        (lambda: Ragged.cat([ragged(), ragged().map(torch.Tensor.float)]), "differ in dtype"),
        (lambda: ragged().with_values(torch.zeros(2)), "these rows have 3 values"),
        (lambda: Ragged(torch.zeros(2), torch.tensor([0, 3])), "must rise from 0 to 2, the number of values"),
        (lambda: Ragged.from_padded(torch.zeros(2, 3), torch.tensor([1])), "lengths do not fit"),
        (lambda: Ragged.from_padded(torch.zeros(1, 3), torch.tensor([4])), "lengths must be from 0 to the width 3"),
        (lambda: ragged()[3], "row 3 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()
