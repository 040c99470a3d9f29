import pytest
import torch

from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.glossary import check_fields, fields, render_markdown


def test_every_field_is_declared_whole():
    for name, field in fields().items():
        assert field.name == name
        assert field.meaning
        assert (field.dtype is None) == ("object" in field.shapes)


def test_standard_fields_of_the_right_form_pass():
    batch = DataProto(
        {
            "responses": Ragged.from_list([[1, 2]]),
            "advantages": torch.zeros(1),
            "input_ids": torch.zeros(1, 4, dtype=torch.int64),
            "mine": torch.zeros(1).half(),
        },
        {"uid": ["0:0"]},
    )
    check_fields(batch)
    batch["advantages"] = Ragged.from_list([[0.5, 0.5]])
    check_fields(batch)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("responses", torch.zeros(1, 2, dtype=torch.int64), "'responses' is dense torch.int64.*ragged int64"),
        ("scores", torch.zeros(1).double(), "'scores' is dense torch.float64.*dense float32"),
        ("scores", torch.zeros(1, 1), "'scores'"),
        ("uid", torch.zeros(1), "'uid' is dense.*object"),
        ("old_log_probs", Ragged.from_list([torch.zeros(2, 2)]), "'old_log_probs'"),
    ],
)
def test_a_standard_field_of_another_form_is_refused(name, value, message):
    with pytest.raises(DataError, match=message):
        check_fields(DataProto.from_single_dict({name: value}))


def test_the_page_has_a_line_for_each_field():
    page = render_markdown()
    assert all(f"| `{name}` |" in page for name in fields())
    assert "| `scores` | dense float32 [rows] | reward |" in page
