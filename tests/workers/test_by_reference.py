"""Columns that stay with the workers that made them; one group of two workers on a real Ray for all tests."""

import functools
import pickle
import time

import pytest
import torch

from rlcore.config.schema import ClusterConfig
from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import column_of
from rlcore.protocol.remote import LocalBlock, RemoteColumn
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

pytestmark = pytest.mark.ray


class Maker(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, batch):
        rows = batch.view("number").tolist()
        tokens = Ragged.from_list([torch.full((1 + n % 3,), float(n)) for n in rows], dtype=torch.float32)
        mask = tokens.with_values((tokens.values % 2 == 0).long())
        return DataProto.from_single_dict({"tokens": tokens, "mask": mask, "rank": torch.full((len(rows),), self.rank)})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def total(self, batch):
        return DataProto.from_single_dict(
            {"total": torch.tensor([float(row.sum()) for row in batch["tokens"].to_list()])}
        )


def double(batch, by):
    tokens = batch["tokens"]
    return {"doubled": tokens.with_values(tokens.values * by)}


def unit_sizes(batch):
    uid = batch["uid"].tolist()
    return {"size": torch.tensor([uid.count(u) for u in uid])}


def too_few(batch):
    return {"x": torch.zeros(len(batch) + 1)}


@pytest.fixture(scope="module")
def group(ray_cluster):
    """Everything of a result is an object of its own."""
    with make_executor(ClusterConfig(workers=2, inline_kb=0.0), log_dir=None, by_value_modules=[]) as executor:
        yield executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Maker), name="maker")


@pytest.fixture
def made(group):
    group.fetched.clear()
    batch = DataProto.from_single_dict({"number": torch.arange(7), "uid": list("abacbca")})
    return batch.union(group.make(batch))


def expected(numbers):
    return [[float(n)] * (1 + n % 3) for n in numbers]


def rows_of(ragged):
    return [row.tolist() for row in ragged.to_list()]


def test_reading_a_column_fetches_that_column_alone(group, made):
    assert isinstance(made.table.column("tokens"), RemoteColumn)
    assert made.table.column("tokens").type_name() == "ragged torch.float32 [rows, *]"
    assert group.fetched == {}
    assert made["rank"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert set(group.fetched) == {"rank"}
    assert rows_of(made["tokens"]) == expected(range(7))
    assert set(group.fetched) == {"rank", "tokens"}


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        (lambda b: b[2:5], [2, 3, 4]),
        (lambda b: b[[6, 0, 0]], [6, 0, 0]),
        (lambda b: b[torch.tensor([True, False] * 3 + [True])], [0, 2, 4, 6]),
        (lambda b: b.repeat(2), [n for n in range(7) for _ in range(2)]),
        (lambda b: b.reorder([6, 5, 4, 3, 2, 1, 0]), [6, 5, 4, 3, 2, 1, 0]),
        (lambda b: DataProto.concat(b.chunk(3, uneven=True)[::-1]), [5, 6, 3, 4, 0, 1, 2]),
        (lambda b: b[:0], []),
        (lambda b: b[[5, 1]].repeat(2, interleave=False)[1:3], [1, 5]),
    ],
)
def test_rows_are_chosen_by_reference(group, made, change, numbers):
    changed = change(made.select(["tokens", "mask"], []))
    sums = group.total(changed)
    assert group.fetched == {}
    assert sums["total"].tolist() == [sum(row) for row in expected(numbers)]
    assert rows_of(changed["tokens"]) == expected(numbers)


def test_union_of_the_same_references_fetches_nothing(group, made):
    twice = made.union(made.select(["tokens"], []))
    assert group.fetched == {}
    assert rows_of(twice["tokens"]) == expected(range(7))


def test_map_runs_where_the_rows_are(group, made):
    doubled = made.map(functools.partial(double, by=3.0), reads=["tokens"])
    assert group.fetched == {}
    assert isinstance(doubled.table.column("doubled"), RemoteColumn)
    assert rows_of(doubled["doubled"]) == [[3 * x for x in row] for row in expected(range(7))]


def test_map_runs_where_the_largest_column_is(group, made):
    with make_executor(ClusterConfig(workers=1, inline_kb=0.0), log_dir=None, by_value_modules=[]) as executor:
        other = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Maker), name="other")
        totals = other.total(made.select(["tokens"], []))  # the smaller column, read first
        both = totals.union(made.select(["tokens"], []))
        mapped = both.map(functools.partial(double, by=2.0), reads=["total", "tokens"])
        assert mapped.table.column("doubled").owner is group


def test_map_keeps_rows_together(made):
    sizes = made.map(unit_sizes, reads=["tokens"], keep_together="uid")["size"]
    assert sizes.tolist() == [3, 2, 3, 2, 2, 2, 3]


def test_map_of_no_rows(made):
    assert len(made[:0].map(functools.partial(double, by=3.0), reads=["tokens"])["doubled"]) == 0


def test_map_that_changes_the_number_of_rows(made):
    with pytest.raises(DataError, match=r"map: too_few returned (5 rows for 4|4 rows for 3)"):
        made.map(too_few, reads=["tokens"]).materialize()


def test_moments_are_counted_where_the_rows_are(group, made):
    moments = made.masked_moments("tokens", "mask")
    assert group.fetched == {}
    kept = torch.tensor([x for row in expected([0, 2, 4, 6]) for x in row])
    assert moments.count == len(kept) == 7
    assert moments.mean == pytest.approx(kept.mean().item())
    assert moments.var == pytest.approx(kept.var(correction=0).item())


def test_columns_outlive_the_worker_that_made_them(ray_cluster):
    with make_executor(ClusterConfig(workers=1, inline_kb=0.0), log_dir=None, by_value_modules=[]) as executor:
        group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Maker), name="gone")
        made = group.make(DataProto.from_single_dict({"number": torch.arange(3)}))
        assert len(made) == 3
        executor._processes[0].shutdown()
        time.sleep(1)
        assert rows_of(made["tokens"]) == expected(range(3))


def test_of_rows_that_are_here_only_those_of_the_column_travel():
    column = column_of("x", torch.arange(1000))
    here = RemoteColumn.of_block(column.spec(), LocalBlock(column), 1000)
    few = here.take(torch.tensor([999, 3, 3]))
    pickled = pickle.dumps(few)
    assert len(pickled) < 4000
    assert pickle.loads(pickled).view().tolist() == [999, 3, 3]
