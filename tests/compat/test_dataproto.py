"""rlcore.compat.DataProto: lines of verl's programs, with tensordict and numpy as the oracle; 15 seconds, with Ray."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import rlcore
from rlcore.compat import DataProto, Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from rlcore.config import ClusterConfig
from rlcore.errors import DataError
from rlcore.protocol import Ragged
from rlcore.workers import ClassWithInitArgs, make_executor


def words(*items: object) -> np.ndarray:
    return np.array(items, dtype=object)


@pytest.fixture
def data() -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(4), "y": torch.ones(4, 2)},
        non_tensors={"name": words("a", "b", "c", "d")},
        meta_info={"seed": 1},
    )


# -- what verl does to its TensorDict and its dict of arrays, done to both


def set_one(batch: Any, objects: Any) -> None:
    batch["x"][0] = 5


def set_rows(batch: Any, objects: Any) -> None:
    batch["y"][1:3] = 0
    objects["name"][2] = "z"


def in_place_arithmetic(batch: Any, objects: Any) -> None:
    batch["y"] *= 3
    batch["x"].add_(1)


def masked(batch: Any, objects: Any) -> None:
    batch["x"].masked_fill_(batch["x"] > 1, -1)


def bind(batch: Any, objects: Any) -> None:
    tensor, array = torch.zeros(4), words(1, 2, 3, 4)
    batch["z"], objects["more"] = tensor, array
    tensor[0], array[0] = 7.0, 9


def delete(batch: Any, objects: Any) -> None:
    del batch["x"]
    del objects["name"]


def pop_and_write(batch: Any, objects: Any) -> None:
    batch["z"] = batch.pop("y")
    batch["z"][0] = -1
    objects["other"] = objects.pop("name")


def update(batch: Any, objects: Any) -> None:
    batch.update({"x": batch["x"] * 2, "w": torch.zeros(4, 1)})
    objects.update({"name": words(1, None, "x", [2])})


def write_a_slice(batch: Any, objects: Any) -> None:
    batch[1:3]["x"][0] = 8
    batch[3]["y"][:] = 4


def write_selected_tensors(batch: Any, objects: Any) -> None:
    batch.select("x")["x"][2] = 6
    batch.exclude("x")["y"][0] = 6


def write_copies(batch: Any, objects: Any) -> None:
    batch[torch.tensor([0, 1])]["x"][:] = 99
    batch[torch.tensor([True, False, True, False])]["y"][:] = 99


def rename(batch: Any, objects: Any) -> None:
    batch.rename_key_("x", "new")
    batch["new"][3] = 0


def over_items(batch: Any, objects: Any) -> None:
    for _, tensor in batch.items():
        tensor[0] = 0
    for array in objects.values():
        array[0] = None


def defaults(batch: Any, objects: Any) -> None:
    assert batch.get("nothing", None) is None
    batch.get("x")[1] = 3
    objects.setdefault("name", words(0, 0, 0, 0))[1] = "set"
    with pytest.raises(KeyError):
        objects["nothing"]
    with pytest.raises(KeyError):
        batch["nothing"]


LINES = [
    set_one,
    set_rows,
    in_place_arithmetic,
    masked,
    bind,
    delete,
    pop_and_write,
    update,
    write_a_slice,
    write_selected_tensors,
    write_copies,
    rename,
    over_items,
    defaults,
]


@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize("source", ["built", "pickled", "joined", "from the core", "deferred"])
def test_the_lines_do_what_they_do_to_a_tensordict_and_a_dict(data: DataProto, source: str, lines: Callable) -> None:
    core = rlcore.DataProto(data.batch, data.non_tensor_batch, data.meta_info)
    made = {
        "built": lambda: data,
        "pickled": lambda: pickle.loads(pickle.dumps(data)),
        "joined": lambda: DataProto.concat([core[:1], data[1:]]),
        "from the core": lambda: DataProto.concat([core]),
        "deferred": lambda: DataProto.deferred(lambda: core),
    }[source]()
    oracle = TensorDict({"x": torch.arange(4), "y": torch.ones(4, 2)}, batch_size=[4])
    objects = {"name": words("a", "b", "c", "d")}
    lines(oracle, objects)
    lines(made.batch, made.non_tensor_batch)
    assert made.batch.keys() == set(oracle.keys())
    torch.testing.assert_close(made.batch, oracle)
    assert {name: array.tolist() for name, array in made.non_tensor_batch.items()} == {
        name: array.tolist() for name, array in objects.items()
    }
    if source != "built":
        assert core["x"].tolist() == [0, 1, 2, 3]
        assert core["name"].tolist() == ["a", "b", "c", "d"]


# -- the batch's own methods, as verl's source has them


def test_statements_change_the_batch_and_return_it(data: DataProto) -> None:
    before = data.batch["x"]
    data.reorder(torch.tensor([3, 1, 0, 2]))
    assert data.batch["x"].tolist() == [3, 1, 0, 2]
    assert data.non_tensor_batch["name"].tolist() == ["d", "b", "a", "c"]
    assert before.tolist() == [0, 1, 2, 3]  # a new tensor, so that what was read stays
    assert data.rename("x", "ids") is data
    data.rename(["y"], ["ones"])
    assert set(data.batch.keys()) == {"ids", "ones"}
    meta = data.meta_info
    other = DataProto.from_dict({"z": torch.zeros(4)}, {"tag": ["t"] * 4}, {"step": 2})
    assert data.union(other) is data
    assert data.batch.keys() == {"ids", "ones", "z"}
    assert data.meta_info is meta
    assert meta == {"seed": 1, "step": 2}
    assert data.to("meta") is data
    assert data.batch["z"].device.type == "meta"
    assert other.batch["z"].device.type == "cpu"


def test_a_failed_statement_changes_nothing(data: DataProto) -> None:
    for statement, message in (
        (lambda: data.reorder(torch.tensor([0, 0, 1, 2])), "each of the 4 rows once"),
        (lambda: data.rename("x", "y"), "two columns the name 'y'"),
        (lambda: data.union(DataProto.from_dict({"x": torch.zeros(4)})), "both have a column 'x'"),
        (lambda: data.union(DataProto.from_dict({"z": torch.zeros(3)})), "4 and 3 rows"),
        (lambda: setattr(data, "batch", {"z": torch.zeros(3)}), "'z' has 3 rows, but the batch has 4"),
        (lambda: setattr(data, "batch", {"z": ["a"] * 4}), "'z' must be a tensor"),
        (lambda: data.batch.update({"": torch.zeros(4)}), "non-empty string"),
        (lambda: data.batch.update({"z": torch.tensor(1)}), "without dimensions"),
        (lambda: data.batch.update({"z": torch.zeros(5)}), "'z' has 5 rows"),
    ):
        with pytest.raises(DataError, match=message):
            statement()
        assert data.keys() == ["x", "y", "name"]
    data.batch["x"].resize_(2)
    assert data.batch["x"].tolist() == [0, 1, 2, 3]


def test_pop_and_meta_info(data: DataProto) -> None:
    popped = data.pop(batch_keys=["x"], non_tensor_batch_keys=["name"], meta_info_keys=["seed"])
    assert (popped.keys(), data.keys()) == (["x", "name"], ["y"])
    assert (popped.meta_info, data.meta_info) == ({"seed": 1}, {})
    data.meta_info.update(temperature=0.5)
    data.meta_info["n"] = 2
    assert data.meta_info == {"temperature": 0.5, "n": 2}
    assert type(popped) is DataProto


def test_a_half_takes_the_columns_of_another_batch_and_gives_its_own(data: DataProto) -> None:
    other = DataProto.from_dict(tensors={"new": torch.arange(len(data))})
    data.batch.update(other.batch)
    assert torch.equal(data.batch["new"], torch.arange(len(data)))
    name, values = data.batch.popitem()
    assert (name, len(values)) == ("new", len(data))
    rows = len(data)
    data.batch.clear()
    assert set(data.batch.keys()) == set()
    assert len(data) == rows


def test_both_halves_can_be_set(data: DataProto) -> None:
    tensor = torch.arange(4.0)
    data.batch = TensorDict({"t": tensor}, batch_size=[4])
    tensor[0] = 9
    assert data.batch == {"t": torch.tensor([9.0, 1, 2, 3])}
    data.non_tensor_batch = {"n": words(1, 2, 3, 4)}
    assert data.keys() == ["t", "n"]
    data.non_tensor_batch = {}
    data.batch = data.batch[:0]
    assert (len(data), data.keys()) == (0, ["t"])
    data.batch = DataProto.from_dict({"s": torch.zeros(2)}).batch
    data.batch = None
    assert (len(data), data.keys()) == (2, [])


def test_the_halves_are_mappings(data: DataProto) -> None:
    assert isinstance(data.batch, Mapping)
    assert isinstance(data.non_tensor_batch, MutableMapping)
    assert data.batch.keys() == {"x", "y"}
    assert data.batch.keys() & {"x", "z"} == {"x"}
    assert set(data.batch.keys()) - {"x"} == {"y"}
    assert dict(data.batch).keys() == {"x", "y"}
    assert {**data.non_tensor_batch}.keys() == {"name"}
    assert len(data.batch.values()) == len(data.batch.items()) == 2
    same = copy.deepcopy(data)
    assert data.batch == same.batch == dict(data.batch)
    assert data.non_tensor_batch == same.non_tensor_batch == {"name": words("a", "b", "c", "d")}
    assert (data.batch == same.batch).all()  # verl's line: TensorDict compares by entry
    same.batch["x"][0] = 1
    assert data.batch != same.batch
    assert data.batch != {"x": data.batch["x"]}
    torch.testing.assert_close(data.batch, {"x": torch.arange(4), "y": torch.ones(4, 2)})
    with pytest.raises(AssertionError, match="x"):
        torch.testing.assert_close(data.batch, dict(same.batch))
    with pytest.raises(TypeError, match="unhashable"):
        hash(data.batch)


SHARING: dict[str, Callable[[DataProto], DataProto]] = {
    "slice": lambda data: data[:2],
    "slice method": lambda data: data.slice(0, 2),
    "chunk": lambda data: data.chunk(2)[0],
    "split": lambda data: data.split(3)[0],
    "select": lambda data: data.select(batch_keys=["x"]),
}
COPYING: dict[str, Callable[[DataProto], DataProto]] = {
    "list": lambda data: data[[0, 1]],
    "mask": lambda data: data[torch.tensor([True, True, False, False])],
    "select_idxs": lambda data: data.select_idxs([0, 1]),
    "repeat": lambda data: data.repeat(2),
    "concat": lambda data: DataProto.concat([data, data]),
    "concat of one": lambda data: DataProto.concat([data]),
    "pickle": lambda data: pickle.loads(pickle.dumps(data)),
    "deepcopy": lambda data: copy.deepcopy(data),
    "mini-batch": lambda data: next(data.make_iterator(2, 1)),
    "unfold": lambda data: data.unfold_column_chunks(2, ["y"]),
    "union": lambda data: DataProto().union(data),
    "the core's concat": lambda data: rlcore.DataProto.concat([data]),
    "the core's union": lambda data: rlcore.DataProto().union(data),
    "the core's deferred": lambda data: rlcore.DataProto.deferred(lambda: data).materialize(),
    "map": lambda data: data.map(same, reads=["x", "name"]),
    "the core's map": lambda data: rlcore.DataProto.concat([data]).map(same, reads=["x", "name"]),
}


def same(batch: rlcore.DataProto) -> rlcore.DataProto:
    return batch


@pytest.mark.parametrize("derive", SHARING)
def test_views_share_memory_as_in_verl(data: DataProto, derive: str) -> None:
    derived = SHARING[derive](data)
    assert type(derived) is DataProto
    derived.batch["x"][0] = 50
    data.batch["x"][1] = 60
    derived.non_tensor_batch["name"][0] = "new"
    assert data.batch["x"].tolist() == [50, 60, 2, 3]
    assert derived.batch["x"][:2].tolist() == [50, 60]
    assert data.non_tensor_batch["name"][0] == "new"


@pytest.mark.parametrize("derive", COPYING)
def test_nothing_else_shares(data: DataProto, derive: str) -> None:
    derived = COPYING[derive](data)
    assert type(derived) is (rlcore.DataProto if "core" in derive else DataProto)
    first = derived["x"].tolist()
    data.batch["x"][:] = 50
    data.non_tensor_batch["name"][:] = "new"
    assert derived["x"].tolist() == first
    assert "new" not in derived["name"]
    if type(derived) is DataProto:
        derived.batch["x"][:] = 60
        assert data.batch["x"].tolist() == [50] * 4
    else:
        derived["x"][:] = 60
        assert derived["x"].tolist() == first


def test_rows_are_views_and_ragged_columns_are_written_too(data: DataProto) -> None:
    data.batch["r"] = Ragged.from_list([[1], [2, 3], [], [4]], torch.int64)
    data[1].batch["y"][0] = 7
    for item in data:
        item.batch["y"][1] = 8
    data.batch["r"][1][0] = 9
    data[:2].batch["r"].values[0] = 6
    assert data.batch["y"].tolist() == [[1, 8], [7, 8], [1, 8], [1, 8]]
    assert [row.tolist() for row in data.batch["r"].to_list()] == [[6], [9, 3], [], [4]]
    assert pickle.loads(pickle.dumps(data)).equal(data)


def test_a_split_may_leave_a_smaller_part_as_in_verl(data: DataProto) -> None:
    assert [len(part) for part in data.split(3)] == [3, 1]
    with pytest.raises(DataError, match="equal chunks"):
        data.chunk(3)


def test_saved_and_loaded(data: DataProto, tmp_path: Path) -> None:
    data.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    loaded.batch["x"][0] = 5
    assert loaded.batch["x"].tolist() == [5, 1, 2, 3]


# -- workers


class Writer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def write(self, data: DataProto) -> DataProto:
        data.batch["x"][0] = 100 + self.rank
        data.non_tensor_batch["name"][0] = "written"
        data.rename("y", "z")
        data.reorder(torch.arange(len(data) - 1, -1, -1))
        data.batch["rows"] = torch.full((len(data),), len(data))
        data.meta_info["kind"] = type(data).__module__
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def write_later(self, data: DataProto) -> DataProto:
        return self.write(data)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, gives={"x": rlcore.ColumnSpec.dense(torch.int64)}
    )
    def declared(self, data: DataProto) -> DataProto:
        data.batch["x"][0] = 100 + self.rank
        return data.select(["x"], [], [])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_all(self, data: DataProto) -> int:
        data.batch["x"] += 1
        return int(data.batch["x"].sum())


@pytest.fixture(params=["in_process", pytest.param("ray", marks=pytest.mark.ray)])
def group(request: pytest.FixtureRequest) -> Any:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        yield RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Writer))
        return
    with make_executor(ClusterConfig(executor="in_process", workers=2)) as executor:
        yield executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Writer), name="writer")


def test_workers_write_into_their_copy_and_return_batches_of_this_class(group: Any, data: DataProto) -> None:
    large = torch.zeros(4, 50_000)  # stays in Ray's store, so that the result holds a reference to it
    data.batch["large"] = large
    for result in (group.write(data), group.write_later(data)):
        assert type(result) is DataProto
        assert result.batch["x"].tolist() == [1, 100, 3, 101]
        assert result.non_tensor_batch["name"].tolist() == ["b", "written", "d", "written"]
        assert result.batch["rows"].tolist() == [2, 2, 2, 2]
        assert result.batch.keys() == {"x", "z", "large", "rows"}
        assert result.meta_info == {"seed": 1, "kind": "rlcore.compat.dataproto"}
        half = result[:2]
        half.batch["large"][1, 0] = 5
        assert result.batch["large"][:, 0].tolist() == [0, 5, 0, 0]
    joined = DataProto.concat([group.write(data), result])  # in part still in Ray's store
    result.batch["large"][:] = 3
    assert joined.batch["large"][:, 0].tolist() == [0, 0, 0, 0, 0, 5, 0, 0]
    assert data.batch["x"].tolist() == [0, 1, 2, 3]
    assert data.non_tensor_batch["name"].tolist() == ["a", "b", "c", "d"]
    assert large.sum() == 0
    assert group.write_all(data) == [10, 10]
    assert data.batch["x"].tolist() == [0, 1, 2, 3]


def test_a_declared_result_is_of_the_arguments_class(group: Any, data: DataProto) -> None:
    declared = group.declared(data)
    assert type(declared) is DataProto
    data.batch = {"y": torch.zeros(4)}
    data.union(declared).batch["x"][1] = 50
    assert data.batch["x"].tolist() == [100, 50, 101, 3]
    assert declared.batch["x"].tolist() == [100, 1, 101, 3]
    core = rlcore.DataProto({"x": torch.arange(4)})
    assert type(group.declared(DataProto.concat([core]))) is DataProto


def test_a_core_batch_stays_one(data: DataProto) -> None:
    core = rlcore.DataProto({"x": torch.arange(4)}, {"name": list("abcd")}, {"seed": 1})
    assert core.equal(data.select(["x"]))
    core.batch["x"][0] = 5
    core.reorder([3, 2, 1, 0])
    assert core["x"].tolist() == [0, 1, 2, 3]
    assert type(core.union(data)) is rlcore.DataProto
    assert type(data.union(core)) is DataProto
    data.batch["x"][0] = 5
    assert core["x"].tolist() == [0, 1, 2, 3]
