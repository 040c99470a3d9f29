"""What a group's calls do; the same test bodies on both executors."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlcore.compat import RayResourcePool, RayWorkerGroup
from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, DataError, WorkerError
from rlcore.protocol import DataProto
from rlcore.workers import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    Executor,
    Future,
    Worker,
    WorkerGroup,
    make_executor,
    register,
)
from rlcore.workers.ray.processes import process_environment

BOTH = ["in_process", pytest.param("ray", marks=pytest.mark.ray)]


def to_every_second(group: WorkerGroup, values: Sequence[int]) -> Sequence[int]:
    return [value * 2 for value in values]


def as_dict(group: WorkerGroup, outputs: list[Any]) -> dict[int, Any]:
    return dict(enumerate(outputs))


class OddError(Exception):
    """Cannot be pickled: its arguments are not what __init__ takes."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Inside(Worker):
    """A worker that another worker makes."""


class Probe(Worker):
    def __init__(self, start: int, scale: int = 1) -> None:
        self.inside = Inside()
        self.start = start
        self.scale = scale
        self.seen: list[Any] = []

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, self.local_rank

    @register(Dispatch.ONE_TO_ALL)
    def add(self, a: int, b: int = 0, *, c: int = 0) -> int:
        return self.start + a + b * self.scale + c + 100 * self.rank

    @register()
    def pair(self, x: int, y: str) -> tuple[int, str]:
        return x, y

    @register(Dispatch.RANK_ZERO)
    def lowest(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)
    def share_of_rank_zero(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto, factor: int = 1) -> DataProto:
        self.seen.append(len(batch))
        rank = torch.full((len(batch),), self.rank)
        return DataProto.from_dict(tensors={"x": batch["x"] * factor, "rank": rank})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows_later(self, batch: DataProto, factor: int = 1) -> DataProto:
        return self.rows(batch, factor)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, batch: DataProto) -> DataProto:
        raise ValueError(f"cannot do {len(batch)} rows")

    @register(Dispatch.ONE_TO_ALL)
    def take_seen(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def note(self, value: Any) -> Any:
        self.seen.append(value)
        return value

    @register({"dispatch_fn": to_every_second, "collect_fn": as_dict})
    def custom(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def apply(self, function: Callable[[int], Any], value: int) -> Any:
        return function(value)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, kind: str) -> None:
        if self.rank == 1:
            match kind:
                case "data":
                    raise DataError("row 3 is bad")
                case "value":
                    raise ValueError("no such value")
                case "odd":
                    raise OddError(1, 2)
                case "exit":
                    sys.exit(3)

    @register(Dispatch.ONE_TO_ALL)
    def env(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")}

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def threads(self) -> int:
        return torch.get_num_threads()

    @register(Dispatch.ONE_TO_ALL)
    def places_of_workers_inside(self) -> list[tuple[int, int]]:
        """Of a worker that `__init__` made, and of one that this call makes, without `construct`."""
        return [(inside.rank, inside.world_size) for inside in (self.inside, Inside())]

    @register(Dispatch.ONE_TO_ALL)
    def has_other(self) -> bool:
        return any(isinstance(value, Future) for value in self.seen)


class Meshed(Worker):
    """Ranks 0 and 1 at the first data-parallel place, rank 2 at the second."""

    def __init__(self) -> None:
        self.set_mesh(dp=self.rank // 2)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": batch["x"], "rank": torch.full((len(batch),), self.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def move(self) -> None:
        self.set_mesh(dp=self.rank)


def cluster_of(executor: str) -> ClusterConfig:
    return ClusterConfig(executor=executor, workers=3)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=BOTH)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with make_executor(cluster_of(request.param), by_value_modules=[sys.modules[__name__]]) as made:
        yield made


@pytest.fixture(scope="module")
def groups(executor: Executor) -> dict[str, WorkerGroup]:
    """Three roles that share three processes; most tests use one of them."""
    roles = {
        "probe": ClassWithInitArgs(Probe, 7, scale=2),
        "other": ClassWithInitArgs(Probe, start=2),
        "meshed": ClassWithInitArgs(Meshed),
    }
    return executor.worker_group(executor.resource_pool(), roles, name="three")


def test_a_worker_inside_a_worker_has_its_rank(groups: dict[str, WorkerGroup]) -> None:
    assert groups["probe"].places_of_workers_inside() == [[(rank, 3)] * 2 for rank in range(3)]
    assert (Inside().rank, Inside().world_size) == (0, 1), "made by hand, outside of every worker"


@pytest.fixture(scope="module")
def group(groups: dict[str, WorkerGroup]) -> WorkerGroup:
    return groups["probe"]


@pytest.fixture
def is_ray(executor: Executor) -> bool:
    return type(executor).__name__ == "RayExecutor"


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)})


def test_one_to_all_gives_all_the_same_and_gathers_in_rank_order(group: WorkerGroup) -> None:
    assert group.world_size == 3
    assert group.place() == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert group.add(1) == [8, 108, 208]
    assert group.add(1, 2, c=3) == [15, 115, 215]
    assert group.add(b=1, a=0) == [9, 109, 209]


def test_all_to_all_gives_each_its_own(group: WorkerGroup) -> None:
    assert group.pair([1, 2, 3], y=["a", "b", "c"]) == [(1, "a"), (2, "b"), (3, "c")]
    with pytest.raises(DataError, match="one value for each of the 3 workers"):
        group.pair([1, 2], ["a", "b"])


def test_rank_zero_alone_is_called(group: WorkerGroup) -> None:
    assert group.lowest(5) == (0, 5)
    assert group.share_of_rank_zero(batch_of(7)) == 3


@pytest.mark.parametrize(("rows", "sizes"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1, 0]), (0, [0, 0, 0])], ids=str)
def test_rows_are_cut_over_all_ranks_every_one_of_which_is_called(
    group: WorkerGroup, rows: int, sizes: list[int]
) -> None:
    group.take_seen()
    out = group.rows(batch_of(rows), factor=10)
    assert out["x"].tolist() == [10 * row for row in range(rows)]
    assert out["rank"].tolist() == [rank for rank, size in enumerate(sizes) for _ in range(size)]
    assert group.take_seen() == [[size] for size in sizes]


def test_a_call_that_does_not_block_gives_a_batch_that_is_read_when_needed(group: WorkerGroup) -> None:
    first = group.rows_later(batch_of(5), factor=2)
    second = group.rows_later(first, factor=5)
    third = group.rows_later(batch=second)
    assert isinstance(third, DataProto)
    assert third["x"].tolist() == [0, 10, 20, 30, 40]
    assert first["x"].tolist() == [0, 2, 4, 6, 8]
    group.drain()


def test_futures_are_read_before_they_are_sent(group: WorkerGroup) -> None:
    future = group.note({"a": 1})
    assert isinstance(future, Future)
    assert group.note([future, (future,)]).get() == [[[{"a": 1}] * 3, ([{"a": 1}] * 3,)]] * 3
    assert future.done()
    assert group.has_other() == [False] * 3
    group.take_seen()


def test_calls_run_in_the_order_in_which_they_were_made(group: WorkerGroup) -> None:
    group.take_seen()
    for value in range(20):
        group.note(value)
    assert group.take_seen() == [list(range(20))] * 3
    group.drain()


def test_a_pair_of_functions_of_ones_own(group: WorkerGroup) -> None:
    assert group.custom([1, 2, 3]) == {0: 2, 1: 5, 2: 8}
    with pytest.raises(DataError, match="split into 2 values for 3 workers"):
        group.custom([1, 2])


def test_methods_that_are_not_there_are_named(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"no registered method 'lowset'.*Did you mean 'lowest'"):
        _ = group.lowset
    with pytest.raises(AttributeError, match=r"set_mesh is not registered; decorate it with @register"):
        _ = group.set_mesh
    assert "lowest" in dir(group)


def test_an_exception_names_role_rank_host_and_method_and_holds_the_workers_traceback(
    group: WorkerGroup, is_ray: bool
) -> None:
    with pytest.raises(WorkerError, match="no such value") as caught:
        group.fail("value")
    message = str(caught.value)
    host = "127.0.0.1" if is_ray else "this process"
    assert message.startswith("probe rank 1 of 3 on ")
    assert is_ray or f"on {host}, in fail(): ValueError: no such value" in message
    assert "in fail(): ValueError: no such value" in message
    assert 'raise ValueError("no such value")' in message
    assert is_ray or isinstance(caught.value.__cause__, ValueError)
    assert group.add(0) == [7, 107, 207], "an exception does not end the group"


def test_rlcores_own_errors_keep_their_type(group: WorkerGroup) -> None:
    with pytest.raises(DataError, match=r"^row 3 is bad \[probe rank 1 of 3 on .*, in fail\(\)\]\n") as caught:
        group.fail("data")
    assert 'raise DataError("row 3 is bad")' in caught.value.__notes__[0]


@pytest.mark.parametrize(("kind", "text"), [("odd", "OddError: 1 and 2"), ("exit", "SystemExit: 3")])
def test_exceptions_of_any_kind_come_back(group: WorkerGroup, kind: str, text: str) -> None:
    with pytest.raises(WorkerError, match=text):
        group.fail(kind)
    assert group.add(0) == [7, 107, 207]


def test_an_error_of_a_call_that_does_not_block_comes_when_read_and_at_drain(group: WorkerGroup) -> None:
    out = group.fail_later(batch_of(3))
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"probe rank . .*in fail_later\(\): ValueError: cannot do 1 rows"):
            _ = out["x"]
    group.drain()
    group.fail_later(batch_of(3))
    group.note(1)
    with pytest.raises(WorkerError, match="cannot do 1 rows"):
        group.drain()
    group.drain()
    with pytest.raises(WorkerError, match="cannot do 1 rows"):
        group.rows(group.fail_later(batch_of(3)))
    assert group.add(0) == [7, 107, 207]


def test_several_roles_share_one_process_a_rank(groups: dict[str, WorkerGroup], is_ray: bool) -> None:
    assert list(groups) == ["probe", "other", "meshed"]
    assert groups["probe"].add(0, 1) == [9, 109, 209]
    assert groups["other"].add(0, 1) == [3, 103, 203]
    pids = groups["probe"].pid()
    assert pids == groups["other"].pid()
    assert len({*pids}) == (3 if is_ray else 1)
    with pytest.raises(WorkerError, match=r"^other rank 1 of 3 on"):
        groups["other"].fail("value")


def test_a_process_has_its_rank_and_threads_in_its_environment(group: WorkerGroup, is_ray: bool) -> None:
    env = group.env()
    if is_ray:
        assert [(e["RANK"], e["WORLD_SIZE"]) for e in env] == [("0", "3"), ("1", "3"), ("2", "3")]
        policy = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        assert [(e["OMP_NUM_THREADS"], e["OMP_WAIT_POLICY"]) for e in env] == [("1", policy)] * 3
        assert group.threads() == [1, 1, 1]
    else:
        assert [e["RANK"] for e in env] == ["", "", ""], "a rank does not leak into this process's environment"


@pytest.mark.usefixtures("ray_cluster")  # the environment depends on the nodes
@pytest.mark.parametrize(
    ("name", "otherwise"),
    [("OMP_WAIT_POLICY", "PASSIVE"), ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"), ("LRU_CACHE_CAPACITY", "128")],
)
def test_threads_do_not_spin_and_few_kernels_are_kept_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, otherwise: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert process_environment(RayResourcePool([1]))[name] == otherwise
    monkeypatch.setenv(name, "said")
    assert process_environment(RayResourcePool([1]))[name] == "said"


def test_the_mesh_that_workers_declare_decides(groups: dict[str, WorkerGroup]) -> None:
    group = groups["meshed"]
    out = group.rows(batch_of(3))
    assert out["x"].tolist() == [0, 1, 2]
    assert out["rank"].tolist() == [0, 0, 2]
    assert group.mesh.coordinates[2] == {"dp": 1}
    with pytest.raises(ConfigError, match="comes too late"):
        group.move()


class Collects(Worker):
    def __init__(self) -> None:
        self.at_start = gc.isenabled()

    @register(Dispatch.ONE_TO_ALL)
    def collector(self) -> tuple[bool, bool]:
        return self.at_start, gc.isenabled()


def test_the_collector_is_off_in_a_process_of_ours_until_the_first_call_has_ended(
    executor: Executor, is_ray: bool
) -> None:
    group = executor.worker_group(executor.resource_pool(1), ClassWithInitArgs(Collects), name="collects")
    assert group.collector() == [(not is_ray, not is_ray)]
    assert group.collector() == [(not is_ray, True)]


@pytest.mark.ray
def test_a_call_through_a_handle_turns_the_collector_on_too(ray_cluster: None) -> None:
    with make_executor(cluster_of("ray"), by_value_modules=[sys.modules[__name__]]) as executor:
        (handle,) = RayWorkerGroup(executor.resource_pool(1), ClassWithInitArgs(Collects))._workers
        assert ray.get(handle.collector.remote()) == (False, False)
        assert ray.get(handle.collector.remote()) == (False, True)


class Fails(Worker):
    def __init__(self, config: dict[str, int]) -> None:
        raise KeyError("missing")


def test_a_constructor_that_fails_says_where(executor: Executor) -> None:
    with pytest.raises(
        WorkerError, match=r"(?s)broken rank 0 of 1 on .*, in __init__\(\): KeyError: 'missing'.*Traceback"
    ):
        executor.worker_group(executor.resource_pool(1), ClassWithInitArgs(Fails, {"a": 1}), name="broken")


def test_only_workers_make_a_group() -> None:
    with pytest.raises(ConfigError, match=r"is not a subclass of rlcore.workers.Worker"):
        ClassWithInitArgs(dict)


def test_code_from_a_file_travels_by_value(
    executor: Executor, group: WorkerGroup, is_ray: bool, tmp_path: Path
) -> None:
    import importlib.util

    path = tmp_path / "mine.py"
    path.write_text("OFFSET = 40\n\ndef shifted(value):\n    return value + OFFSET\n")
    spec = importlib.util.spec_from_file_location("only_on_the_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_on_the_driver"] = module
    try:
        spec.loader.exec_module(module)
        if is_ray:
            with pytest.raises(WorkerError, match="No module named 'only_on_the_driver'"):
                group.apply(module.shifted, 2)
        cluster = cluster_of("ray" if is_ray else "in_process")
        with make_executor(cluster, by_value_modules=[module]):
            assert group.apply(module.shifted, 2) == [42] * 3
        if is_ray:
            with pytest.raises(WorkerError, match="No module named 'only_on_the_driver'"):
                group.apply(module.shifted, 2)
    finally:
        del sys.modules["only_on_the_driver"]


class Counted:
    """Counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        type(self).pickled += 1
        return list, ()


def test_what_all_ranks_get_is_pickled_once(group: WorkerGroup, is_ray: bool) -> None:
    assert group.note(Counted()).get() == [[], [], []] or not is_ray
    assert Counted.pickled == (1 if is_ray else 0)
    group.take_seen()


def test_arguments_that_cannot_be_sent_are_an_error_here(group: WorkerGroup, is_ray: bool) -> None:
    if not is_ray:
        pytest.skip("nothing is sent in process")
    with (
        pytest.raises(WorkerError, match=r"probe.apply\(\): its arguments cannot be sent"),
        open(os.devnull, "rb") as file,
    ):
        group.apply(file, 1)
    assert group.add(0) == [7, 107, 207]
