"""A batch keeps its number of rows when its last column leaves, in every operation; a few seconds."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlcore import DataProto
from rlcore.config import ClusterConfig
from rlcore.errors import DataError
from rlcore.protocol.balance import split_batch_by_cost
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register


def ten() -> DataProto:
    return DataProto({"x": torch.arange(10)}, {"y": list("abcdefghij")}, {"seed": 1})


def popped(batch: DataProto) -> DataProto:
    batch.pop(["x"], ["y"])
    return batch


def deleted(batch: DataProto) -> DataProto:
    del batch.batch["x"]
    batch.non_tensor_batch.pop("y")
    return batch


WAYS = {
    "select": lambda batch: batch.select([], []),
    "pop": popped,
    "what pop returns": lambda batch: batch.pop(meta_info_keys=["seed"]),
    "delete": deleted,
    "tensors excluded": lambda batch: DataProto(batch.batch.exclude("x")),
    "map": lambda batch: batch.map(lambda part: {}, reads=[]),
    "a TensorDict": lambda batch: DataProto(TensorDict({}, batch_size=[10])),
    "from_tensordict": lambda batch: DataProto.from_tensordict(TensorDict({}, batch_size=[10])),
    "deferred": lambda batch: DataProto.deferred(lambda: batch.select([], [])),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rows_stay_when_the_last_column_leaves(way: str) -> None:
    bare = WAYS[way](ten())
    assert bare.keys() == []
    assert len(bare) == 10
    with pytest.raises(DataError, match=r"column 'z' has 3 rows, but the batch has 10.*make a new batch"):
        bare["z"] = torch.zeros(3)
    bare["z"] = torch.arange(10)
    assert bare[[9]]["z"].tolist() == [9]


OPERATIONS: dict[str, tuple[Callable[[DataProto], DataProto], int]] = {
    "slice": (lambda bare: bare[2:5], 3),
    "list": (lambda bare: bare[[1, 1, 3, 9]], 4),
    "mask": (lambda bare: bare[torch.arange(10) > 7], 2),
    "repeat": (lambda bare: bare.repeat(3), 30),
    "sample_level_repeat": (lambda bare: bare.sample_level_repeat([2] * 10), 20),
    "reorder": (lambda bare: bare.reorder(torch.arange(9, -1, -1)), 10),
    "unfold": (lambda bare: bare.unfold_column_chunks(2), 20),
    "rename": (lambda bare: bare.rename([], []), 10),
    "to": (lambda bare: bare.to("cpu"), 10),
    "keeping": (lambda bare: bare.keeping(torch.arange(10) < 4), 4),
    "union with kept rows": (lambda bare: bare.union(ten().keeping(torch.arange(10) < 4)), 4),
    "chunk": (lambda bare: bare.chunk(3, uneven=True)[0], 4),
    "split": (lambda bare: bare.split([1, 9])[1], 9),
    "concat": (lambda bare: DataProto.concat([bare[:3], bare[:0], bare[:4], DataProto()]), 7),
    "union with nothing": (lambda bare: bare.union(DataProto()), 10),
    "of nothing with it": (lambda bare: DataProto().union(bare), 10),
    "pickle": (lambda bare: pickle.loads(pickle.dumps(bare)), 10),
    "materialize": (lambda bare: bare.materialize(), 10),
    "by cost": (lambda bare: split_batch_by_cost(bare, [1] * 10, 2)[0].parts[1], 5),
    "mini-batch": (lambda bare: next(bare.make_iterator(4, 1, uneven=True)), 4),
    "TensorDict and back": (lambda bare: DataProto.from_tensordict(bare.to_tensordict()), 10),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_counts_rows_without_columns(operation: str) -> None:
    apply, rows = OPERATIONS[operation]
    assert len(apply(ten().select([], []))) == rows


def test_saved_and_loaded(tmp_path: Path) -> None:
    ten().select([], []).save_to_disk(tmp_path / "bare")
    assert len(DataProto.load_from_disk(tmp_path / "bare")) == 10


def test_rows_that_do_not_fit_are_refused() -> None:
    bare = ten().select([], [])
    with pytest.raises(DataError, match="union of batches with 10 and 3 rows"):
        bare.union(DataProto({"x": torch.zeros(3)}))
    with pytest.raises(DataError, match=r"only some of them have \['x', 'y'\]"):
        DataProto.concat([bare, ten()])
    with pytest.raises(DataError, match=r"returned 10 rows for 5"):
        ten()[:5].map(lambda part: bare, reads=[])
    assert bare.equal(ten().select([], []))
    assert not bare.equal(bare[:9])


class Counter(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def count(self, batch: DataProto) -> DataProto:
        batch["rows"] = torch.full((len(batch),), len(batch))
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def strip(self, batch: DataProto) -> DataProto:
        return batch.select([], [])

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives={})
    def declared(self, batch: DataProto) -> DataProto:
        return batch.select([], [], [])


@pytest.mark.parametrize("executor", ["in_process", pytest.param("ray", marks=pytest.mark.ray)])
def test_ranks_get_and_return_rows_without_columns(executor: str, request: pytest.FixtureRequest) -> None:
    if executor == "ray":
        request.getfixturevalue("ray_cluster")
    made = make_executor(ClusterConfig(executor=executor, workers=2))
    made.start()
    try:
        group = made.worker_group(made.resource_pool(), ClassWithInitArgs(Counter), name="counter")
        assert group.count(ten()[:5].select([], []))["rows"].tolist() == [3, 3, 3, 2, 2]
        assert len(group.strip(ten())) == 10
        assert len(group.declared(ten())) == 10
    finally:
        made.shutdown()
