"""`async def` methods of workers; the same test bodies on both executors."""

from __future__ import annotations

import asyncio
import decimal
import functools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlcore.compat import RayResourcePool, RayWorkerGroup
from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, DataError, WorkerError
from rlcore.protocol import DataProto
from rlcore.protocol.columns import ColumnSpec
from rlcore.workers import ClassWithInitArgs, Dispatch, Executor, Future, Worker, WorkerGroup, make_executor, register

BOTH = ["in_process", pytest.param("ray", marks=pytest.mark.ray)]
WIDE = ColumnSpec("dense", torch.int64, (30_000,), "cpu")


def counted(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Awaitable[Any]:
        self.calls += 1
        return method(self, *args)

    return call


def hidden(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    return lambda self, *args: method(self, *args)


class Inside(Worker):
    """A worker that an `async def` method makes."""


async def leave() -> None:
    sys.exit(4)


class Talker(Worker):
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.seen: list[Any] = []
        self.calls = 0
        self.cancelled = False

    @register(Dispatch.ONE_TO_ALL)
    async def double(self, value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value + self.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def rows(self, batch: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return DataProto.from_dict(tensors={"x": batch["x"] * 10, "rank": torch.full((len(batch),), self.rank)})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives={"y": WIDE})
    async def wide_rows_after(self, batch: DataProto) -> DataProto:
        await self.event.wait()
        return DataProto.from_dict(tensors={"y": batch["x"][:, None].expand(-1, 30_000).contiguous()})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def wait(self, name: str) -> tuple[str, int]:
        await self.event.wait()
        return name, self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def set(self) -> None:
        self.event.set()

    @register(Dispatch.ONE_TO_ALL)
    def set_at_once(self) -> bool:
        """Set from outside of the loop's thread, and show that no coroutine runs before this method has ended."""
        self.event._loop.call_soon_threadsafe(self.event.set)  # type: ignore[attr-defined]
        self.seen.append("sync begins")
        threading.Event().wait(0.2)
        self.seen.append("sync ends")
        return True

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def note_after(self, value: Any) -> None:
        self.seen.append(f"{value} begins")
        await self.event.wait()
        self.seen.append(f"{value} ends")

    @register(Dispatch.ONE_TO_ALL)
    def take_seen(self) -> list[Any]:
        self.event.clear()
        seen, self.seen = self.seen, []
        return seen

    @register(Dispatch.ONE_TO_ALL)
    async def fail(self, kind: str) -> None:
        await asyncio.sleep(0)
        if self.rank == 1:
            match kind:
                case "data":
                    raise DataError("row 3 is bad")
                case "value":
                    raise ValueError("no such value")
                case "exit":
                    sys.exit(3)
                case "exit in a task":
                    await asyncio.gather(leave())
                case "cancel":
                    raise asyncio.CancelledError("enough")
        elif kind == "value":
            await asyncio.Event().wait()

    @register(Dispatch.ONE_TO_ALL)
    @counted
    async def decorated(self) -> int:
        await asyncio.sleep(0)
        return self.calls

    @register(Dispatch.ONE_TO_ALL)
    @hidden
    async def hidden_coroutine(self) -> int:
        await asyncio.sleep(0)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def places_of_workers_inside(self) -> list[int]:
        first = Inside().rank
        await asyncio.sleep(0)
        return [first, Inside().rank, await asyncio.create_task(self._inside())]

    async def _inside(self) -> int:
        return Inside().rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def work_until(self, end: str, ended: str) -> None:
        while not Path(end).exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        Path(ended).touch()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def exists(self, path: str) -> bool:
        return Path(path).exists()

    @register(Dispatch.ONE_TO_ALL)
    async def digits(self) -> int:
        """Return a value that a context variable holds."""
        await asyncio.sleep(0)
        return decimal.getcontext().prec


@pytest.fixture(scope="module", params=BOTH)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    cluster = ClusterConfig(executor=request.param, workers=2)
    with make_executor(cluster, by_value_modules=[sys.modules[__name__]]) as made:
        yield made


@pytest.fixture(scope="module")
def groups(executor: Executor) -> dict[str, WorkerGroup]:
    roles = {"talker": ClassWithInitArgs(Talker), "other": ClassWithInitArgs(Talker)}
    return executor.worker_group(executor.resource_pool(), roles, name="both")


@pytest.fixture
def group(groups: dict[str, WorkerGroup]) -> WorkerGroup:
    groups["talker"].take_seen()
    return groups["talker"]


@pytest.fixture
def is_ray(executor: Executor) -> bool:
    return type(executor).__name__ == "RayExecutor"


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)})


def test_the_awaited_value_is_the_result_and_the_mode_collects_it(groups: dict[str, WorkerGroup]) -> None:
    group = groups["talker"]
    assert group.double(4) == [8, 9]
    out = group.rows(batch_of(5))
    assert out["x"].tolist() == [0, 10, 20, 30, 40]
    assert out["rank"].tolist() == [0, 0, 0, 1, 1]
    assert groups["other"].double(1) == [2, 3]
    assert group.decorated() == [1, 1]
    assert group.hidden_coroutine() == [0, 1]


@pytest.mark.timeout(60)
def test_calls_of_one_worker_are_in_flight_together(groups: dict[str, WorkerGroup], group: WorkerGroup) -> None:
    calls = [group.wait(name) for name in ("first", "second")]
    other = groups["other"].wait("other")
    wide = group.wide_rows_after(batch_of(3))
    assert all(isinstance(call, Future) and not call.done() for call in calls)
    assert group.double(1) == [2, 3], "others of the worker run meanwhile"
    group.set()
    assert [call.get() for call in calls] == [[("first", 0), ("first", 1)], [("second", 0), ("second", 1)]]
    assert wide["y"][:, -1].tolist() == [0, 1, 2]
    assert not other.done(), "it waits for the event of the role's own worker"
    groups["other"].set()
    assert other.get() == [("other", 0), ("other", 1)]


@pytest.mark.timeout(60)
def test_calls_start_in_order_and_no_coroutine_runs_within_a_method_that_is_not_async(group: WorkerGroup) -> None:
    call = group.note_after("async")
    assert group.set_at_once() == [True, True]
    call.get()
    assert group.take_seen() == [["async begins", "sync begins", "sync ends", "async ends"]] * 2


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("data", DataError, r"^row 3 is bad \[talker rank 1 of 2 on .*, in fail\(\)\]"),
        ("value", WorkerError, r"(?s)^talker rank 1 of 2 on .*, in fail\(\): ValueError: no such value.*Traceback"),
        ("exit", WorkerError, r"^talker rank 1 of 2 on .*, in fail\(\): SystemExit: 3"),
        ("exit in a task", WorkerError, r"^talker rank 1 of 2 on .*, in fail\(\): SystemExit: 4"),
        ("cancel", WorkerError, r"^talker rank 1 of 2 on .*, in fail\(\): CancelledError: enough"),
    ],
)
@pytest.mark.timeout(60)
def test_an_error_names_rank_and_method_also_while_the_other_rank_waits(
    group: WorkerGroup, kind: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        group.fail(kind)
    assert group.double(0) == [0, 1], "the group stays usable"


def test_a_worker_made_in_an_async_method_has_its_rank(group: WorkerGroup, is_ray: bool) -> None:
    assert group.places_of_workers_inside() == [[0, 0, 0], [1, 1, 1]]
    with decimal.localcontext(prec=7):
        assert group.digits() == [28 if is_ray else 7] * 2


def test_a_span_lasts_until_the_coroutine_has_ended(group: WorkerGroup) -> None:
    group.processes.spans().get()
    call = group.wait("timed")
    assert not [span for span in group.processes.spans().get() if span.method == "wait"]
    group.set()
    call.get()
    spans = {span.method: span for span in group.processes.spans().get() if span.rank == 1}
    assert spans["wait"].role == "talker"
    assert spans["wait"].began <= spans["set"].began <= spans["wait"].ended


@pytest.mark.timeout(60)
def test_shutdown_ends_calls_in_flight(executor: Executor) -> None:
    group = executor.worker_group(executor.resource_pool(1), ClassWithInitArgs(Talker), name="ends")
    calls = [group.wait("for ever"), group.wait("too")]
    assert group.double(1) == [2]
    group.processes.shutdown()
    for call in calls:
        with pytest.raises(WorkerError, match=r"^ends rank 0 of 1 on .*, in wait\(\): .*the group was shut down"):
            call.get()


@pytest.mark.timeout(60)
def test_a_group_on_the_same_places_waits_for_calls_in_flight(ray_cluster: None, tmp_path: Path) -> None:
    with make_executor(ClusterConfig(executor="ray"), by_value_modules=[sys.modules[__name__]]) as executor:
        pool = executor.resource_pool(1)
        first, second = (executor.worker_group(pool, ClassWithInitArgs(Talker), name=name) for name in ("a", "b"))
        call = first.work_until(str(tmp_path / "end"), str(tmp_path / "ended"))
        found = second.exists(str(tmp_path / "ended"))
        assert not call.done()
        (tmp_path / "end").touch()
        assert found.get() == [True]


@pytest.mark.timeout(60)
def test_calls_by_hand_are_in_flight_together(ray_cluster: None) -> None:
    with make_executor(ClusterConfig(executor="ray"), by_value_modules=[sys.modules[__name__]]):
        pool = RayResourcePool([1])
        group = RayWorkerGroup(pool, ClassWithInitArgs(Talker))
        (handle,) = group._workers
        waits = [handle.wait.remote(name) for name in ("one", "two")]
        ray.get(handle.set.remote())
        assert ray.get(waits) == [("one", 0), ("two", 0)]
        group.processes.shutdown()
        with pytest.raises(WorkerError, match="was shut down"):
            handle.set.remote()
        pool.release()


def test_async_generators_are_refused() -> None:
    async def values(self: Worker) -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigError, match=r"values is an async generator.*Return a list"):
        register(Dispatch.ONE_TO_ALL)(values)
    with pytest.raises(ConfigError, match=r"values is an async generator.*Return a list"):
        type("Override", (Talker,), {"double": values})


UNENDED = """
import asyncio
from rlcore.config.schema import ClusterConfig
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

class Waiter(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def wait(self):
        await asyncio.Event().wait()

executor = make_executor(ClusterConfig(executor="in_process", workers=2))
executor.start()
call = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Waiter)).wait()
print(call.done())
"""


def test_a_program_ends_without_shutdown() -> None:
    ran = subprocess.run([sys.executable, "-c", UNENDED], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")
