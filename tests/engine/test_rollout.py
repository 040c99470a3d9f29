"""`RolloutEngine.generate`, on an engine whose decoding fails."""

import pytest
import torch

from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.protocol import DataProto, Ragged


class Failing(RolloutEngine):
    """Its `abort` takes rows out one by one, and `in_flight` is a live view of them."""

    version = 0

    def __init__(self):
        self.rows = {}

    @property
    def in_flight(self):
        return self.rows.keys()

    def add(self, requests):
        self.rows |= {request.id: request for request in requests}

    def step(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def abort(self, ids):
        for each in ids:
            self.rows.pop(each)
        return []

    def sync(self, weights, version, shapes):
        raise NotImplementedError


def test_an_error_while_decoding_leaves_the_engine_idle_and_is_the_one_that_is_raised():
    engine, prompts = Failing(), Ragged.from_list([torch.tensor([5]), torch.tensor([6, 7])])
    batch = DataProto.from_single_dict({"prompts": prompts, "uid": ["0", "1"], "sample_index": torch.zeros(2).long()})
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(batch, Sampling(max_tokens=3))
    assert not engine.in_flight
