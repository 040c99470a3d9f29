import pickle

import pytest
import torch

from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_batch_on_a_gpu_behaves_as_on_the_cpu():
    tensors = {
        "x": torch.tensor([1.0, 2.0, 3.0]),
        "r": Ragged.from_list([[1.0], [2.0, 3.0], []], dtype=torch.bfloat16),
        "mask": Ragged.from_list([[1], [0, 1], []], dtype=torch.int64),
    }
    here = DataProto(tensors, {"o": ["a", "b", "c"]})
    there = here.to("cuda")
    assert there["x"].device.type == there["r"].device.type == "cuda"
    for change in (
        lambda batch: batch[[2, 0]],
        lambda batch: batch[torch.tensor([True, False, True], device=batch.view("x").device)],
        lambda batch: DataProto.concat(batch.chunk(2, uneven=True)),
        lambda batch: batch.repeat(2),
        lambda batch: batch.sample_level_repeat(torch.tensor([2, 0, 1], device=batch.view("x").device)),
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: batch.union(batch),
    ):
        assert change(there).to("cpu").equal(change(here))
    assert there.masked_moments("r", "mask") == here.masked_moments("r", "mask")
    padded = there["r"].to_padded(side="left")
    assert padded.device.type == "cuda"
    assert Ragged.from_padded(padded, there["r"].lengths, "left").to("cpu").equal(here["r"])
    with pytest.raises(DataError, match=r"on cuda:0 with dense torch\.float32"):
        DataProto.concat([there.select(["x"]), here.select(["x"])])
