"""Resharding in one process: what lies where in the buffer, and what is refused."""

import pytest
import torch

from rlcore.engine.parallel.layout import Layout, ShardSpec
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import ProcessGroups
from rlcore.engine.weights.reshard import Reshard
from rlcore.errors import ConfigError, DataError

CUTS = {
    "q": ShardSpec((4, 6), (0,), 0),
    "q.bias": ShardSpec((4,), (0,), 0),
    "k": ShardSpec((2, 6), (0,), 0),
    "v": ShardSpec((2, 6), (0,), 0),
    "o": ShardSpec((6, 4), (0,), 1),
    "norm": ShardSpec((6,), (0,)),
}


def alone(cuts=CUTS, layout=None) -> Reshard:
    return Reshard(layout or GenerationLayout(Layout()), cuts, ProcessGroups(0))


def shards():
    return {name: torch.randn(cut.shape) for name, cut in CUTS.items()}


def test_weights_that_engines_fuse_are_one_matrix_in_the_buffer():
    reshard, given = alone(), shards()
    found = dict(reshard.gather(given.items()))
    fused = reshard.buffer[: 8 * 6].view(8, 6)
    assert fused.equal(torch.cat([given["q"], given["k"], given["v"]]))
    assert found["q"].data_ptr() == fused.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("norm"), "shards are missing of norm"),
        (lambda given: given.update(q=torch.zeros(2, 6)), r"shard of q has shape \[2, 6\]; the layout has \[4, 6\]"),
        (lambda given: given.update(head=torch.zeros(1)), r"shard of head has shape \[1\]; the layout has none"),
    ],
)
def test_shards_of_another_layout_are_refused(change, message):
    given = shards()
    change(given)
    with pytest.raises(DataError, match=message):
        list(alone().gather(given.items()))


def test_what_cannot_be_divided_is_refused():
    layout = GenerationLayout(Layout(tp=4), tp=2)
    with pytest.raises(ConfigError, match=r"w has shape \[6, 8\]: engine.tp=4 does not divide its dimension 0"):
        alone({"w": ShardSpec((6, 8), (0,), 0)}, layout)
