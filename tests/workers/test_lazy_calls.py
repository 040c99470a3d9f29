"""Calls of declared methods: known before they are made, checked at both ends, waited for by those who need them."""

import gc
import os
import subprocess
import sys
import time
import weakref

import pytest
import ray
import torch

from rlcore.config.schema import ClusterConfig
from rlcore.errors import DataError, WorkerError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import ColumnSpec
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

SLOW = {"text": ColumnSpec.objects(), "late": ColumnSpec.ragged(torch.int64)}
NUMBER = {"number": ColumnSpec.dense(torch.int64)}
WIDE = {"wide": ColumnSpec.dense(torch.float32, 1000)}


class Maker(Worker):
    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        gives={"text": ColumnSpec.objects(), "late": ColumnSpec.ragged(torch.int64)},
    )
    def slow(self, batch, seconds):
        time.sleep(seconds)
        numbers = batch.view("number").tolist()
        return DataProto.from_single_dict(
            {"text": [f"n{n}" for n in numbers], "late": Ragged.from_list([torch.full((n,), n) for n in numbers])}
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives=WIDE)
    def wide(self, batch):
        return DataProto.from_single_dict({"wide": batch.view("number")[:, None].float().expand(-1, 1000)})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives=NUMBER)
    def half_fails(self, batch):
        """Raise on rank 0, while rank 1 waits for it, as in a collective."""
        if self.rank == 0:
            raise ValueError("half")
        time.sleep(100.0)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives=NUMBER)
    def wrong(self, batch, how):
        number = batch["number"]
        return {
            "rows": lambda: DataProto.from_single_dict({"number": number[:-1]}),
            "undeclared": lambda: DataProto.from_single_dict({"number": number, "numbr": number}),
            "missing": lambda: DataProto.from_single_dict({"other": number}),
            "dtype": lambda: DataProto.from_single_dict({"number": number.float()}),
            "type": lambda: number,
            "meta": lambda: DataProto.from_single_dict({"number": number}, {"k": 1}),
            "device": lambda: DataProto.from_single_dict({"number": number.to("meta")}),
            "raise": lambda: 1 / 0,
            "die": lambda: os._exit(3),
        }[how]()


class Reader(Worker):
    @register(
        Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("late",), gives={"total": ColumnSpec.dense(torch.int64)}
    )
    def total(self, batch):
        return DataProto.from_single_dict({"total": torch.tensor([int(row.sum()) for row in batch.view("late")])})

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def pulled(self, batch):
        """Return the bytes that this rank fetched of `wide`, and those of the rows that it was sent."""
        column = batch.table.column("wide")
        column.fetch()
        return sum(block.nbytes for block in column.blocks), batch.view("wide").nbytes


@pytest.fixture(scope="module")
def groups(ray_cluster):
    with make_executor(ClusterConfig(workers=2, inline_kb=0.0), log_dir=None, by_value_modules=[]) as executor:
        yield tuple(
            executor.worker_group(executor.resource_pool(workers), ClassWithInitArgs(cls), name=cls.__name__.lower())
            for cls, workers in ((Maker, 2), (Reader, 3))
        )


def numbers(count):
    return DataProto.from_single_dict({"number": torch.arange(count)})


@pytest.mark.ray
def test_a_batch_is_known_and_taken_apart_before_it_is_made(groups):
    maker, reader = groups
    batch = numbers(7)
    batch = batch.union(maker.slow(batch, 1.5))
    chosen = batch.rename("text", "said").repeat(2)[[13, 0, 4, 5]]
    chosen = DataProto.concat(chosen.chunk(2)[::-1])
    totals = reader.total(chosen.select(["late", "number"], []))
    assert totals.keys() == ["total"]
    assert len(totals) == 4
    assert not batch.is_ready
    assert not chosen.is_ready
    assert not totals.is_ready
    assert totals["total"].tolist() == [4, 4, 36, 0]
    assert batch.is_ready
    assert chosen["said"].tolist() == ["n2", "n2", "n6", "n0"]
    assert reader.fetched["late"] == maker.fetched["late"] == 0
    assert chosen.materialize()["late"].lengths.tolist() == [2, 2, 6, 0]


@pytest.mark.ray
def test_a_missing_column_is_an_error_at_the_call_that_says_who_gives_it(groups):
    _, reader = groups
    with pytest.raises(DataError, match=r"reader.total\(\) reads the column 'late', which its batch lacks.*Maker.slow"):
        reader.total(numbers(3))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("rows", r"returned \d rows of 'number' for \d rows that it was sent"),
        ("undeclared", r"returned \['numbr'\], which it does not declare.*Did you mean 'number'"),
        ("missing", r"did not return \['number'\]"),
        ("dtype", r"returned 'number' as dense torch.float32 \[rows\], but declares it as dense torch.int64"),
        ("type", "returned Tensor, but declares a DataProto"),
        ("meta", r"returned meta_info \['k'\]"),
        ("device", "on the device 'meta', which has no values to send"),
    ],
)
@pytest.mark.parametrize("executor", ["in_process", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_result_other_than_declared(request, executor, how, said):
    if executor == "ray":
        maker, _ = request.getfixturevalue("groups")
        with pytest.raises(DataError, match=said + r"(.|\n)*maker rank \d of 2 on .*, in wrong\(\)"):
            maker.wrong(numbers(5), how).materialize()
    elif how != "device":  # in one process nothing travels
        with make_executor(ClusterConfig(executor="in_process", workers=1)) as here:
            maker = here.worker_group(here.resource_pool(), ClassWithInitArgs(Maker), name="maker")
            with pytest.raises(DataError, match=said):
                maker.wrong(numbers(5), how).materialize()


@pytest.mark.ray
def test_the_error_of_a_producer_reaches_who_reads_its_consumer(groups):
    maker, reader = groups
    bad = maker.wrong(numbers(5), "raise").rename("number", "late")
    with pytest.raises(
        WorkerError, match=r"maker rank \d of 2 on .*, in wrong\(\): ZeroDivisionError(.|\n)*reader rank"
    ):
        reader.total(bad)["total"]
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        maker.drain()


@pytest.mark.ray
def test_a_consumer_pulls_little_more_than_its_rows(groups):
    maker, reader = groups
    wide = maker.wide(numbers(5000))  # 20 MB from 2 ranks, to 3
    for pulled, used in reader.pulled(wide).get():
        assert used == pytest.approx(20e6 / 3, rel=0.01)
        assert used <= pulled <= 1.1 * used


@pytest.mark.ray
def test_a_worker_that_dies_while_others_wait_for_its_columns(ray_cluster):
    with make_executor(ClusterConfig(workers=1), log_dir=None, by_value_modules=[]) as executor:
        maker, reader = (
            executor.worker_group(executor.resource_pool(), ClassWithInitArgs(cls), name=cls.__name__.lower())
            for cls in (Maker, Reader)
        )
        start = time.monotonic()
        totals = reader.total(maker.wrong(numbers(3), "die").rename("number", "late"))
        with pytest.raises(WorkerError, match=r"maker rank 0(.|\n)*died"):
            totals["total"]
        with pytest.raises(WorkerError, match=r"maker rank 0 of 1 on .* died during wrong\(\)"):
            maker.drain()
        assert time.monotonic() - start < 30


@pytest.mark.ray
def test_a_failure_on_one_rank_is_told_to_who_waits_for_a_later_call(ray_cluster):
    with make_executor(ClusterConfig(workers=2), log_dir=None, by_value_modules=[]) as executor:
        maker = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Maker), name="maker")
        start = time.monotonic()
        first = maker.half_fails(numbers(4))
        later = maker.slow(numbers(4), 0.0)
        with pytest.raises(WorkerError, match=r"maker rank 0 of 2 on .*, in half_fails\(\): ValueError: half"):
            later["text"]
        with pytest.raises(WorkerError, match="ValueError: half"):
            first["number"]
        assert time.monotonic() - start < 30


@pytest.mark.ray
def test_what_was_read_here_still_travels_by_reference_and_no_rows_are_no_trouble(groups):
    maker, reader = groups
    wide = maker.wide(numbers(600))
    assert wide["wide"].shape == (600, 1000)
    assert maker.fetched["wide"] == 600 * 4000
    chosen = DataProto.concat([wide[:0], wide[10:20], wide[:0], wide[5:6]])
    assert all(block.nbytes >= 0 for block in chosen.table.column("wide").blocks)
    assert sum(used for _, used in reader.pulled(chosen).get()) == 11 * 4000
    assert chosen["wide"][:, 0].tolist() == [*range(10, 20), 5]
    assert maker.fetched["wide"] == 600 * 4000, "fetched once"


@pytest.mark.ray
def test_one_column_does_not_keep_the_others(groups):
    maker, _ = groups
    kept = maker.slow(numbers(9), 0.0)
    text = kept.select([], ["text"])
    late = kept.table.column("late")
    late.wait()
    known = [weakref.ref(block.object) for block in late.blocks]
    maker.drain()
    del kept, late
    gc.collect()
    assert [ref() for ref in known] == [None] * len(known)
    assert text["text"].tolist() == [f"n{n}" for n in range(9)]


def private_bytes():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith(("Private_Dirty", "Private_Clean")))


def stored_bytes():
    total = ray.cluster_resources()["object_store_memory"]
    return total - ray.available_resources().get("object_store_memory", 0)


@pytest.mark.ray
@pytest.mark.parametrize("counted", [200, pytest.param(800, marks=pytest.mark.slow)])
def test_hundreds_of_steps_leave_memory_flat(groups, counted):
    maker, reader = groups

    def steps(count):
        for _ in range(count):
            batch = numbers(60)
            batch = batch.union(maker.slow(batch, 0.0)).union(maker.wide(batch))
            reader.total(batch.repeat(2))["total"]
            maker.drain()
        time.sleep(1)  # until Ray has let go
        return private_bytes(), stored_bytes()

    before, stored = steps(200)
    after, stored_after = steps(counted)
    # A step makes 240 kB of `wide` and 100 objects.
    assert after - before < 1e4 * counted
    assert stored_after - stored < 1250 * counted


FULL = """
import ray, torch
from rlcore.config.schema import ClusterConfig
from rlcore.errors import WorkerError
from rlcore.protocol import DataProto
from rlcore.protocol.columns import ColumnSpec
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

class Big(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives={"big": ColumnSpec.dense(torch.float32, 250_000)})
    def make(self, batch):
        return DataProto.from_single_dict({"big": torch.ones(len(batch), 250_000)})

ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
with make_executor(ClusterConfig(workers=1)) as executor:
    group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Big), name="big")
    first, second = (group.make(DataProto.from_single_dict({"x": torch.arange(60)})) for _ in range(2))
    try:
        second["big"]
    except WorkerError as error:
        print(error)
    assert first["big"].sum() == 60 * 250_000, "what was there before is not lost"
    del first
    assert group.make(DataProto.from_single_dict({"x": torch.arange(9)}))["big"].sum() == 9 * 250_000
"""


@pytest.mark.ray
def test_a_full_object_store_and_a_full_disk(tmp_path):
    full = {"RAY_local_fs_capacity_threshold": "0.0001", "RAY_prestart_worker_first_driver": "0"}
    script = tmp_path / "full.py"
    script.write_text(FULL)
    run = subprocess.run([sys.executable, script], env=os.environ | full, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "column 'big' from make() of big rank 0 is lost" in run.stdout
    assert "OutOfDiskError: Local disk is full" in run.stdout


class OnGPU(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives=NUMBER)
    def count(self, batch):
        return DataProto.from_single_dict({"number": batch["number"].to(self.device) + 1})


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_column_on_a_gpu_travels_by_host_memory(ray_cluster):
    with make_executor(ClusterConfig(workers=1, gpus_per_worker=1.0)) as executor:
        group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(OnGPU), name="gpu")
        number = group.count(numbers(5))["number"]
        assert number.device.type == "cpu"
        assert number.tolist() == [1, 2, 3, 4, 5]
