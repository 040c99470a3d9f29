import json

import pytest
import torch

from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged


def batch_of(**objects):
    return DataProto({"x": torch.zeros(2), "r": Ragged.from_list([[1], []], dtype=torch.bfloat16)}, objects)


@pytest.mark.parametrize(
    "value", [(1, 2), {1: 2}, [{"k": {3}}], float("nan"), float("inf"), object, torch.zeros(1), b"x"]
)
def test_what_json_cannot_hold_is_refused_by_column_and_row(tmp_path, value):
    with pytest.raises(DataError, match="row 1 of object column 'o'"):
        batch_of(o=["fine", value]).save_to_disk(tmp_path / "batch")
    with pytest.raises(DataError, match="meta_info 'k'"):
        DataProto(meta_info={"k": value}).save_to_disk(tmp_path / "batch")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path):
    batch_of().save_to_disk(tmp_path / "a" / "batch")
    with pytest.raises(DataError, match="exists already"):
        batch_of(o=[1, 2]).save_to_disk(tmp_path / "a" / "batch")
    assert DataProto.load_from_disk(str(tmp_path / "a" / "batch")).keys() == ["x", "r"]


def test_a_folder_without_a_batch_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="was not written by save_to_disk"):
        DataProto.load_from_disk(tmp_path / "nothing")
    batch_of(o=["ä", None]).save_to_disk(tmp_path / "batch")
    rest = json.loads((tmp_path / "batch" / "batch.json").read_text())
    (tmp_path / "batch" / "batch.json").write_text(json.dumps({**rest, "format": 2}))
    with pytest.raises(DataError, match="in format 2"):
        DataProto.load_from_disk(tmp_path / "batch")
    (tmp_path / "batch" / "batch.json").write_text(json.dumps({**rest, "columns": rest["columns"][2:]}))
    assert DataProto.load_from_disk(tmp_path / "batch")["o"].tolist() == ["ä", None]
    (tmp_path / "batch" / "columns.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="was not written by save_to_disk"):
        DataProto.load_from_disk(tmp_path / "batch")


def test_columns_that_share_storage_are_saved_each(tmp_path):
    batch = batch_of()
    twice = batch.union(batch.rename(["x", "r"], ["y", "s"]))[1:]
    twice.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").equal(twice)
