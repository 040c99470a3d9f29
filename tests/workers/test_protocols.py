"""Every dispatch mode on eight real processes, whose torch.distributed groups say who got the same rows.

Two roles share the processes. `three` trains with pp 2, tp 2, dp 2: rank = 4 dp + 2 pp + tp. `hybrid` trains with
(pp 1, tp 4, dp 2) and generates with tp 2, as in HybridFlow's figure 8: rank = 4 dp + tp, tp = 2 generating tp +
micro_dp. Tests that end the group come last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcore.config.schema import ClusterConfig
from rlcore.errors import DataError, WorkerError
from rlcore.protocol import DataProto
from rlcore.workers import ClassWithInitArgs, Dispatch, Future, Worker, WorkerGroup, make_executor, register

pytestmark = pytest.mark.ray


def backwards(group: WorkerGroup, batch: DataProto) -> Any:
    """Cut rows over the stages, the last rows to the first stage."""
    numbers, count = group.mesh.slices(["pp"])
    parts = batch.chunk(count, uneven=True)[::-1]
    return [parts[number] for number in numbers]


def of_last_ranks(group: WorkerGroup, outputs: list[Any]) -> DataProto:
    """Join what the ranks at dp=1, tp=1 return."""
    return DataProto.concat([outputs[rank] for rank in group.mesh.sources(["pp"], {"dp": -1, "tp": -1})])


class Meshed(Worker):
    """A place in a torch mesh of 2 x 2 x 2."""

    def __init__(self, *names: str) -> None:
        self.init_process_group(timeout=60)
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        self.at = {name: mesh.get_local_rank(name) for name in names}
        self.peers = {name: mesh.get_group(name) for name in names}
        self.trained: list[int] = []

    def gathered(self, value: Any, axis: str) -> list[Any]:
        """Return the values of both ranks along an axis of torch's mesh."""
        values: list[Any] = [None, None]
        dist.all_gather_object(values, value, group=self.peers[axis])
        return values

    def check_same(self, value: Any, *axes: str) -> None:
        for axis in axes:
            if self.gathered(value, axis) != [value, value]:
                raise DataError(f"along {axis}: {self.gathered(value, axis)}")

    def answer(self, batch: DataProto, factor: int, more: DataProto | None, *same_along: str) -> DataProto:
        """Return the rows with this rank's number, once it is clear that the ranks along `same_along` have the same."""
        x = batch["x"]
        self.check_same([x.tolist(), factor, len(more or ())], *same_along)
        return DataProto.from_single_dict({"x": x * factor, "rank": torch.full((len(batch),), self.rank)})


class Three(Meshed):
    def __init__(self) -> None:
        super().__init__("dp", "pp", "tp")
        self.set_mesh(**self.at)

    @register(Dispatch.PROTO_3D)
    def proto_3d(self, batch: DataProto, factor: int = 1, *, more: DataProto | None = None) -> DataProto | None:
        """Only the last stage has an output, and there one rank of each tensor-parallel group."""
        counts = torch.tensor([len(batch)])
        dist.all_reduce(counts, group=self.peers["dp"])
        made = self.answer(batch, factor, more, "pp", "tp")
        made["of"] = counts.expand(len(batch)).clone()
        return made if (self.at["pp"], self.at["tp"]) == (1, 0) else None

    @register(Dispatch.PROTO_3D, blocking=False)
    def later(self, batch: DataProto) -> DataProto | None:
        return self.proto_3d(batch, 10)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, batch: DataProto, factor: int = 1, more: DataProto | None = None) -> DataProto:
        return self.answer(batch, factor, more, "pp", "tp")

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[torch.Tensor], torch.Tensor], batch: DataProto) -> torch.Tensor:
        self.check_same(batch["x"].tolist(), "pp", "tp")
        return function(batch["x"])

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, batch: DataProto, *, weight: float) -> dict[str, float]:
        total = weight * float(batch["x"].sum())
        self.check_same(total, "pp", "tp")
        return {"rank": self.rank, "total": total}

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, value: Any, *, name: str) -> Any:
        self.check_same([value, name], "pp", "tp")
        return self.rank, value, name

    @register(Dispatch.PP_ONLY_3D)
    def weight_names(self, prefix: str, *, layers: int) -> list[str]:
        self.check_same([prefix, layers], "pp", "tp", "dp")
        return [f"{prefix}.{self.at['pp'] * layers + i}@{self.rank}" for i in range(layers)]

    @register(Dispatch.PP_ONLY_3D, blocking=False)
    def weight_names_later(self) -> list[str]:
        return [str(self.rank)]

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, batch: DataProto, *, scale: int) -> list[int]:
        self.check_same([batch["x"].tolist(), scale], "pp", "tp", "dp")
        return [self.rank, scale * len(batch)]

    @register(Dispatch.ALL_TO_ALL)
    def all_to_all(self, value: int, *, name: str) -> list[Any]:
        return [self.rank, value, name]

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, value: int) -> list[int]:
        return [self.rank, value]

    @register({"dispatch_fn": backwards, "collect_fn": of_last_ranks})
    def custom(self, batch: DataProto) -> DataProto:
        return self.answer(batch, 1, None, "dp", "tp")

    @register(Dispatch.PROTO_3D)
    def fail_at(self, batch: DataProto, rank: int) -> DataProto:
        if self.rank == rank:
            raise ValueError(f"no {batch['x'].tolist()}")
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def fail_alone(self, batch: DataProto) -> DataProto:
        if self.rank == 6:
            raise ValueError("rank 6 gives up")
        dist.barrier(group=self.peers["tp"])
        return batch


class Hybrid(Meshed):
    def __init__(self) -> None:
        super().__init__("dp", "generating_tp", "micro_dp")
        tp = 2 * self.at["generating_tp"] + self.at["micro_dp"]
        self.set_mesh(pp=0, tp=tp, dp=self.at["dp"], micro_dp=self.at["micro_dp"])

    @register(Dispatch.ALL_MICRO_DP_3D)
    def generate(self, batch: DataProto, factor: int = 1, *, more: DataProto | None = None) -> DataProto:
        """Between the replicas of one training replica, the results are gathered: it trains on them."""
        self.trained = [x for part in self.gathered((batch["x"] * factor).tolist(), "micro_dp") for x in part]
        return self.answer(batch, factor, more, "generating_tp")

    @register(Dispatch.PROTO_3D)
    def train(self, batch: DataProto) -> DataProto:
        if batch["x"].tolist() != self.trained:
            raise DataError(f"trains on {batch['x'].tolist()}, generated {self.trained}")
        return self.answer(batch, 1, None, "generating_tp", "micro_dp")


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[dict[str, WorkerGroup]]:
    roles = {"three": ClassWithInitArgs(Three), "hybrid": ClassWithInitArgs(Hybrid)}
    with make_executor(ClusterConfig(workers=8), by_value_modules=[sys.modules[__name__]]) as executor:
        yield executor.worker_group(executor.resource_pool(), roles, name="mesh")


@pytest.fixture
def three(groups: dict[str, WorkerGroup]) -> WorkerGroup:
    return groups["three"]


def batch_of(rows: int) -> DataProto:
    return DataProto.from_single_dict({"x": torch.arange(rows)})


EVEN_AND_UNEVEN = pytest.mark.parametrize("rows", [8, 7, 5, 1, 0])


@EVEN_AND_UNEVEN
def test_3d_proto(three: WorkerGroup, rows: int) -> None:
    first = (rows + 1) // 2
    for out in (three.proto_3d(batch_of(rows), 10, more=batch_of(3)), three.later(batch_of(rows))):
        assert out["x"].tolist() == [10 * row for row in range(rows)]
        assert out["rank"].tolist() == [2] * first + [6] * (rows - first)
        assert out["of"].tolist() == [rows] * rows, "the data-parallel ranks had all rows between them"
    out = three.proto_3d(batch=batch_of(rows), factor=2)
    assert out["x"].tolist() == [2 * row for row in range(rows)]


@EVEN_AND_UNEVEN
def test_dp_compute_proto_alone_and_with_a_function(three: WorkerGroup, rows: int) -> None:
    first = (rows + 1) // 2
    out = three.dp_compute_proto(batch_of(rows), 3, batch_of(1))
    assert out["x"].tolist() == [3 * row for row in range(rows)]
    assert out["rank"].tolist() == [0] * first + [4] * (rows - first)
    assert three.apply(torch.square, batch_of(rows)).tolist() == [row * row for row in range(rows)]
    assert three.apply(torch.neg, batch=batch_of(rows)).tolist() == [-row for row in range(rows)]
    with pytest.raises(DataError, match="first positional argument must be a function, got DataProto"):
        three.apply(batch_of(rows), torch.square)


@EVEN_AND_UNEVEN
def test_micro_dp_gives_each_generating_replica_one_slice_of_what_it_trains_on(
    groups: dict[str, WorkerGroup], rows: int
) -> None:
    """The replicas are the ranks {0, 2}, {1, 3}, {4, 6}, {5, 7}."""
    sizes = {8: [2, 2, 2, 2], 7: [2, 2, 2, 1], 5: [2, 1, 1, 1], 1: [1, 0, 0, 0], 0: [0, 0, 0, 0]}[rows]
    out = groups["hybrid"].generate(batch_of(rows), 10, more=batch_of(6))
    assert out["x"].tolist() == [10 * row for row in range(rows)]
    assert out["rank"].tolist() == np.repeat([0, 1, 4, 5], sizes).tolist()
    assert (
        groups["hybrid"].train(out.select(["x"]))["rank"].tolist()
        == np.repeat([0, 4], [(rows + 1) // 2, rows // 2]).tolist()
    )


def test_pp_only_asks_one_rank_of_each_stage(three: WorkerGroup) -> None:
    assert three.weight_names("layers", layers=2) == ["layers.0@0", "layers.1@0", "layers.2@2", "layers.3@2"]
    later = three.weight_names_later()
    assert isinstance(later, Future)
    assert later.get() == ["0", "2"]


def test_one_result_for_each_data_parallel_rank(three: WorkerGroup) -> None:
    """Rows 0 + 1 + 2 and 3 + 4, times a half."""
    assert three.metric(batch_of(5), weight=0.5) == [{"rank": 0, "total": 1.5}, {"rank": 4, "total": 3.5}]
    assert three.dp_compute([[1], {"b": 2}], name=["c", "d"]) == [(0, [1], "c"), (4, {"b": 2}, "d")]
    with pytest.raises(DataError, match=r"argument 'name' is 8 values.*each of the 2 data-parallel ranks"):
        three.dp_compute([1, 2], name=list("abcdefgh"))


def test_every_rank_and_rank_zero(three: WorkerGroup) -> None:
    assert three.one_to_all(batch_of(3), scale=2) == [[rank, 6] for rank in range(8)]
    assert three.all_to_all([*range(10, 18)], name=list("abcdefgh")) == [
        [rank, 10 + rank, "abcdefgh"[rank]] for rank in range(8)
    ]
    assert three.rank_zero(5) == [0, 5]


def test_a_pair_of_functions_over_the_mesh(three: WorkerGroup) -> None:
    """Stage 0 gets the last two of five rows; ranks 5 and 7 are those of its and the next stage's dp=1, tp=1."""
    out = three.custom(batch_of(5))
    assert out["x"].tolist() == [3, 4, 0, 1, 2]
    assert out["rank"].tolist() == [5, 5, 7, 7, 7]


class Counted:
    """Counts how often each is pickled."""

    pickled: list[int]

    def __init__(self, pickled: list[int], row: int) -> None:
        self.pickled, self.row = pickled, row

    def __reduce__(self) -> tuple[Any, ...]:
        self.pickled[self.row] += 1
        return int, (self.row,)


@pytest.mark.parametrize(
    ("role", "method"), [("three", "proto_3d"), ("three", "dp_compute_proto"), ("hybrid", "generate")]
)
def test_each_slice_is_put_once_for_all_ranks_that_need_it(
    groups: dict[str, WorkerGroup], role: str, method: str
) -> None:
    pickled = [0] * 5
    batch = batch_of(5)
    batch["counted"] = np.array([Counted(pickled, row) for row in range(5)], dtype=object)
    assert getattr(groups[role], method)(batch)["x"].tolist() == [0, 1, 2, 3, 4]
    assert pickled == [1] * 5


@pytest.mark.parametrize("rank", [0, 5])
def test_an_error_on_one_rank_names_it_and_leaves_the_group_usable(three: WorkerGroup, rank: int) -> None:
    """Also on a rank whose result nobody collects. Rank 0 has rows 0 to 2, rank 5 the others."""
    rows = [0, 1, 2] if rank == 0 else [3, 4]
    with pytest.raises(WorkerError) as caught:
        three.fail_at(batch_of(5), rank=rank)
    message = str(caught.value)
    place = f"dp={rank // 4}, pp={rank // 2 % 2}, tp={rank % 2}"
    assert message.startswith(f"three rank {rank} of 8 ({place}) on ")
    assert f", in fail_at(): ValueError: no {rows}" in message
    assert three.proto_3d(batch_of(2))["rank"].tolist() == [2, 6]


def test_an_error_while_a_peer_waits_for_it_breaks_the_group_and_says_so(
    groups: dict[str, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore.workers.ray import processes

    monkeypatch.setattr(processes, "STRAGGLER_SECONDS", 1.0)
    with pytest.raises(
        WorkerError,
        match=r"^three rank 6 of 8 \(dp=1, pp=1, tp=0\) on .*, in fail_alone\(\): ValueError: rank 6 gives up",
    ):
        groups["three"].fail_alone(batch_of(4))
    for group in groups.values():
        with pytest.raises(
            WorkerError, match=r"(?s)^ranks \[7\] did not come back.*The failure was: .*rank 6 gives up"
        ):
            group.train(batch_of(4)) if group is groups["hybrid"] else group.rank_zero(1)
