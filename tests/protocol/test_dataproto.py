import copy
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlcore.errors import DataError
from rlcore.protocol import DataProto, DataProtoItem, Moments, Ragged


@pytest.fixture
def batch():
    return DataProto.from_dict(
        tensors={
            "scores": torch.tensor([1.0, 2.0, 3.0]),
            "responses": Ragged.from_list([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6, 7])]),
        },
        non_tensors={"answer": ["a", ["b"], {"c": 1}]},
        meta_info={"temperature": 0.5},
    )


# -- making and reading


def test_columns_of_each_kind_are_read_back(batch):
    assert len(batch) == 3
    assert batch.keys() == ["scores", "responses", "answer"]
    assert batch["scores"].tolist() == [1.0, 2.0, 3.0]
    assert [row.tolist() for row in batch["responses"].to_list()] == [[1, 2], [3], [4, 5, 6, 7]]
    assert batch["answer"].dtype == object
    assert batch["answer"].tolist() == ["a", ["b"], {"c": 1}]
    assert batch.meta_info == {"temperature": 0.5}
    assert "answer" in batch
    assert "nothing" not in batch


def test_lists_of_equal_length_stay_one_object_a_row():
    batch = DataProto.from_dict(non_tensors={"pair": [[1, 2], [3, 4]], "number": np.array([1.5, 2.5])})
    assert batch["pair"].shape == (2,)
    assert batch["pair"][1] == [3, 4]
    assert type(batch["number"][0]) is float
    table = DataProto.from_dict(non_tensors={"table": np.arange(6).reshape(2, 3)})["table"]
    assert table.shape == (2,)
    assert table[1].tolist() == [3, 4, 5]


def test_from_single_dict_sorts_columns_by_kind():
    batch = DataProto.from_single_dict({"x": torch.zeros(2), "y": np.array(["a", "b"], dtype=object)}, {"z": 1})
    assert list(batch.batch.keys()) == ["x"]
    assert list(batch.non_tensor_batch.keys()) == ["y"]
    assert batch.meta_info == {"z": 1}


def test_a_nested_tensor_becomes_ragged():
    nested = torch.nested.nested_tensor([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], layout=torch.jagged)
    assert DataProto({"x": nested})["x"].equal(Ragged.from_list([[1.0], [2.0, 3.0]]))


@pytest.mark.parametrize(
    ("tensors", "objects", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, "'b' has 3 rows, but the batch has 2"),
        ({"a": torch.zeros(2)}, {"b": ["x"]}, "'b' has 1 rows, but the batch has 2"),
        ({"a": torch.zeros(2), "b": Ragged.from_list([[1.0]])}, {}, "'b' has 1 rows"),
        ({"a": torch.zeros(2)}, {"a": ["x", "y"]}, "'a' is given twice"),
        ({"a": ["x"]}, {}, "'a' must be a tensor"),
        ({}, {"a": torch.zeros(2)}, "'a' must be a list or an array"),
        ({"a": torch.tensor(1.0)}, {}, "'a' cannot be a tensor without dimensions"),
        ({}, {"a": "text"}, "'a' cannot be str 'text'"),
        ({}, {"": ["x"]}, "name must be a non-empty string"),
    ],
)
def test_wrong_columns_are_refused(tensors, objects, message):
    with pytest.raises(DataError, match=message):
        DataProto.from_dict(tensors, objects)


def test_constructors_change_nothing_that_they_are_given():
    tensors, objects, meta = {"x": torch.zeros(2)}, {"y": [1, 2]}, {"z": 1}
    batch = DataProto.from_dict(tensors, objects, meta)
    batch.meta_info["z"] = 2
    batch["x"] = torch.ones(2)
    batch.pop(["x"], ["y"])
    assert tensors["x"].tolist() == [0, 0]
    assert objects == {"y": [1, 2]}
    assert meta == {"z": 1}


# -- immutability and binding


def test_a_read_is_private_and_a_bound_value_is_copied(batch):
    ones = torch.ones(3)
    batch["weights"] = ones
    ones.zero_()
    batch["weights"].zero_()
    batch["responses"].values.zero_()
    batch["answer"][0] = "other"
    assert batch["weights"].tolist() == [1, 1, 1]
    assert batch["responses"].values.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch["answer"][0] == "a"


def test_a_bound_tensor_leaves_its_graph():
    batch = DataProto({"x": torch.ones(2, requires_grad=True) * 2})
    assert not batch.view("x").requires_grad


def test_views_and_slices_share_storage(batch):
    assert batch.view("scores").data_ptr() == batch.view("scores").data_ptr()
    part = batch[1:]
    assert part.view("scores").data_ptr() == batch.view("scores")[1:].data_ptr()
    assert part.view("responses").values.data_ptr() == batch.view("responses").values[2:].data_ptr()
    assert batch.select().view("scores").data_ptr() == batch.view("scores").data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        batch.view("answer")[0] = "other"


def test_a_slice_is_pickled_without_the_rest():
    ragged = Ragged.from_lengths(torch.zeros(2000), torch.full((1000,), 2))
    batch = DataProto({"x": torch.zeros(1000, 10), "r": ragged}, {"o": ["x" * 10] * 1000})
    assert len(pickle.dumps(batch[1:2])) < 2_000


def test_binding_reaches_this_batch_alone(batch):
    earlier = batch.select()
    batch["scores"] = torch.zeros(3)
    batch.batch["extra"] = torch.ones(3)
    assert earlier["scores"].tolist() == [1, 2, 3]
    assert "extra" not in earlier
    with pytest.raises(DataError, match="'extra' has 2 rows, but the batch has 3"):
        batch["extra"] = [1, 2]
    alone = DataProto({"x": torch.zeros(3)})
    alone["x"] = torch.zeros(5)
    assert len(alone) == 5


# -- the two halves


def test_batch_is_a_live_tensordict_surface(batch):
    half = batch.batch
    assert list(half.keys()) == ["scores", "responses"]
    assert half.batch_size == torch.Size([3])
    assert half.get("nothing") is None
    assert half.get("scores").tolist() == [1, 2, 3]
    assert "answer" not in half
    half.set("x", torch.zeros(3)).update({"y": torch.ones(3)})
    assert batch["y"].tolist() == [1, 1, 1]
    assert half.select("x").keys() == {"x"}
    assert half.exclude("x", "y").keys() == {"scores", "responses"}
    assert half.pop("x").tolist() == [0, 0, 0]
    assert half.pop("x", None) is None
    assert "x" not in batch
    half.rename_key_("y", "z")
    del half["z"]
    assert batch.keys() == ["scores", "responses", "answer"]
    assert half[1]["scores"].item() == 2
    assert half[1:]["scores"].tolist() == [2, 3]
    assert [row["scores"].item() for row in half] == [1, 2, 3]
    assert {name: len(value) for name, value in half.items()} == {"scores": 3, "responses": 3}
    assert not half.is_empty()
    with pytest.raises(DataError, match="'answer' must be a tensor"):
        half["answer"] = ["x", "y", "z"]
    with pytest.raises(DataError, match="'answer' is an object column"):
        half["answer"]


def test_non_tensor_batch_is_a_live_mapping(batch):
    half = batch.non_tensor_batch
    assert dict(half.items())["answer"].tolist() == ["a", ["b"], {"c": 1}]
    assert list(half) == ["answer"]
    assert len(half) == 1
    half["uid"] = np.array(["0:0", "1:0", "2:0"], dtype=object)
    assert batch["uid"].tolist() == ["0:0", "1:0", "2:0"]
    with pytest.raises(DataError, match="'uid' must be a list or an array"):
        half["uid"] = torch.zeros(3)
    with pytest.raises(DataError, match=r"no column 'uids'.*Did you mean 'uid'"):
        half.pop("uids")


# -- rows


def test_one_row_is_an_item_as_in_verl(batch):
    item = batch[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["scores"].shape == ()
    assert item.batch["responses"].tolist() == [4, 5, 6, 7]
    assert item.non_tensor_batch["answer"] == {"c": 1}
    assert item["scores"] == 3
    assert "answer" in item
    assert [row["answer"] for row in batch][:1] == ["a"]
    with pytest.raises(DataError, match="row has no column 'x'"):
        item["x"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, "row 3 is outside the batch of 3 rows"),
        ([0, -4], "row -4 is outside"),
        ([True, False], "mask has 2 entries for 3 rows"),
        ([True, 1, 2], "only integers or only bools, got bool, int"),
        ([0.5], "only integers or only bools, got float"),
        (torch.tensor([0.0]), "integers or bools"),
        (torch.tensor([[0]]), "must be one-dimensional"),
        (np.array(["a"]), "integers or bools"),
        ((None,), "got NoneType"),
        (None, "got NoneType"),
    ],
)
def test_wrong_rows_are_refused(batch, index, message):
    with pytest.raises(DataError, match=message):
        batch[index]


def test_sample_level_repeat_by_hand(batch):
    for times in ([2, 0, 1], (2, 0, 1), torch.tensor([2, 0, 1]), np.array([2, 0, 1])):
        repeated = batch.sample_level_repeat(times)
        assert repeated["scores"].tolist() == [1, 1, 3]
        assert repeated["responses"].values.tolist() == [1, 2, 1, 2, 4, 5, 6, 7]
        assert repeated["answer"].tolist() == ["a", "a", {"c": 1}]
    for wrong in ([1, 2], [1, 1, -1], [[1], [1], [1]], [1.0, 1.0, 1.0], []):
        with pytest.raises(DataError, match="one count >= 0 for each of the 3 rows"):
            batch.sample_level_repeat(wrong)


def test_repeat_by_hand(batch):
    assert batch.repeat(2)["scores"].tolist() == [1, 1, 2, 2, 3, 3]
    assert batch.repeat(2, interleave=False)["scores"].tolist() == [1, 2, 3, 1, 2, 3]
    assert len(batch.repeat(0)) == 0
    with pytest.raises(DataError, match="repeat_times must be an integer >= 0, got -1"):
        batch.repeat(-1)


def test_unfold_column_chunks_by_hand():
    batch = DataProto.from_dict(
        {
            "pair": torch.arange(8).reshape(2, 4),
            "r": Ragged.from_list([[1, 2], [3, 4, 5, 6]]),
            "s": torch.tensor([7, 8]),
        },
        {"texts": [["a", "b"], ["c", "d"]], "uid": ["u", "v"]},
    )
    unfolded = batch.unfold_column_chunks(2, split_keys=["pair", "r", "texts"])
    assert unfolded["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [row.tolist() for row in unfolded["r"].to_list()] == [[1], [2], [3, 4], [5, 6]]
    assert unfolded["texts"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert unfolded["s"].tolist() == [7, 7, 8, 8]
    assert unfolded["uid"].tolist() == ["u", "u", "v", "v"]
    assert batch.unfold_column_chunks(2).equal(batch.repeat(2))
    for keys, message in (
        (["s"], r"'s' cannot be unfolded into 2 equal parts: its shape is \[2\]"),
        (["uid"], "'uid' cannot be unfolded into 2 equal parts: row 0 is not a sequence"),
        (["nothing"], "no column 'nothing'"),
    ):
        with pytest.raises(DataError, match=message):
            batch.unfold_column_chunks(2, split_keys=keys)
    with pytest.raises(DataError, match="'r' cannot be unfolded into 4 equal parts: row 0 has 2 values"):
        batch.unfold_column_chunks(4, split_keys=["r"])


def test_uneven_chunks_and_splits_are_an_explicit_choice(batch):
    assert [len(part) for part in batch.chunk(3)] == [1, 1, 1]
    with pytest.raises(DataError, match=r"3 rows cannot be split into 2 equal chunks; pass uneven=True"):
        batch.chunk(2)
    assert [part["scores"].tolist() for part in batch.chunk(2, uneven=True)] == [[1, 2], [3]]
    assert [len(part) for part in batch.chunk(5, uneven=True)] == [1, 1, 1, 0, 0]
    with pytest.raises(DataError, match="3 rows cannot be split into parts of 2"):
        batch.split(2)
    assert [len(part) for part in batch.split(2, uneven=True)] == [2, 1]
    assert [len(part) for part in batch.split([0, 3])] == [0, 3]
    assert [len(part) for part in batch.split(np.int64(1))] == [1, 1, 1]
    with pytest.raises(DataError, match="add up to the 3 rows"):
        batch.split([1, 1])
    with pytest.raises(DataError, match="chunks must be an integer >= 1, got 0"):
        batch.chunk(0)
    zero_rows = batch[:0].chunk(2)
    assert [len(part) for part in zero_rows] == [0, 0]
    assert zero_rows[0].keys() == batch.keys()


def test_reorder_returns_a_batch_and_takes_permutations_alone(batch):
    assert batch.reorder(torch.tensor([2, 0, 1]))["scores"].tolist() == [3, 1, 2]
    assert batch["scores"].tolist() == [1, 2, 3]
    for wrong in ([0, 1], [0, 0, 1], [0, 1, 2, 2]):
        with pytest.raises(DataError, match="reorder needs each of the 3 rows once"):
            batch.reorder(wrong)


def test_select_idxs_and_slice_are_indexing(batch):
    assert batch.select_idxs([2, 0]).equal(batch[[2, 0]])
    assert batch.slice(0, None, 2).equal(batch[::2])


def test_make_iterator(batch):
    six = batch.repeat(2)
    assert [part["scores"].tolist() for part in six.make_iterator(4, 2, uneven=True)] == [[1, 1, 2, 2], [3, 3]] * 2
    dropped = six.make_iterator(4, 1, dataloader_kwargs={"drop_last": True})
    assert [part["scores"].tolist() for part in dropped] == [[1, 1, 2, 2]]

    def shuffled(seed):
        parts = DataProto({"x": torch.arange(64)}).make_iterator(32, 2, seed, {"shuffle": True})
        return [part["x"].tolist() for part in parts]

    first = shuffled(1)
    assert first == shuffled(1)
    assert first != shuffled(2)
    assert first[:2] != first[2:]
    assert sorted(first[0] + first[1]) == list(range(64))
    assert next(batch.make_iterator(3, 1)).meta_info == {"temperature": 0.5}
    for arguments, message in (
        ({"mini_batch_size": 2}, "3 rows cannot be split into mini-batches of 2"),
        ({"mini_batch_size": 0}, "mini_batch_size must be"),
        ({"mini_batch_size": 3, "dataloader_kwargs": {"shuffle": True}}, "pass seed="),
        ({"mini_batch_size": 3, "dataloader_kwargs": {"num_workers": 1}}, "num_workers"),
    ):
        with pytest.raises(DataError, match=message):
            batch.make_iterator(**arguments)


# -- columns


def test_select_keeps_what_is_not_named_and_refuses_what_is_missing(batch):
    assert batch.select(batch_keys=["scores"]).keys() == ["scores", "answer"]
    assert batch.select(non_tensor_batch_keys=[]).keys() == ["scores", "responses"]
    assert batch.select(meta_info_keys=[]).meta_info == {}
    for keys, message in (
        ({"batch_keys": ["score"]}, "no column 'score'.*Did you mean 'scores'"),
        ({"batch_keys": ["answer"]}, "'answer' is an object column, but a tensor column is needed"),
        ({"non_tensor_batch_keys": ["answers"]}, "no column 'answers'.*Did you mean 'answer'"),
        ({"non_tensor_batch_keys": ["scores"]}, "'scores' is a tensor column, but an object column is needed"),
        ({"meta_info_keys": ["temp"]}, "no key 'temp'"),
    ):
        with pytest.raises(DataError, match=message):
            batch.select(**keys)
    deep = batch.select(deepcopy=True)
    deep["answer"][1].append("more")
    assert batch["answer"][1] == ["b"]


def test_pop_takes_all_or_nothing(batch):
    popped = batch.pop(batch_keys=["scores"], non_tensor_batch_keys=["answer"], meta_info_keys=["temperature"])
    assert popped.keys() == ["scores", "answer"]
    assert popped.meta_info == {"temperature": 0.5}
    assert batch.keys() == ["responses"]
    assert batch.meta_info == {}
    with pytest.raises(DataError, match="no column 'scores'"):
        batch.pop(batch_keys=["responses", "scores"])
    assert batch.keys() == ["responses"]


def test_rename(batch):
    assert batch.rename("scores", "rewards").keys() == ["rewards", "responses", "answer"]
    swapped = batch.rename(["scores", "responses"], ["responses", "scores"])
    assert swapped["responses"].tolist() == [1, 2, 3]
    assert batch.keys() == ["scores", "responses", "answer"]
    for old, new, message in (
        ("score", "x", "Did you mean 'scores'"),
        ("scores", "answer", "gives two columns the name 'answer'"),
        (["scores"], ["x", "y"], "one new name for each column"),
    ):
        with pytest.raises(DataError, match=message):
            batch.rename(old, new)


def test_union_joins_columns_and_meta(batch):
    more = DataProto({"scores": torch.tensor([1.0, 2.0, 3.0]), "x": torch.zeros(3)}, meta_info={"y": 1})
    both = batch.union(more)
    assert both.keys() == ["scores", "responses", "answer", "x"]
    assert both.meta_info == {"temperature": 0.5, "y": 1}
    assert "x" not in batch


def test_union_with_a_side_that_has_no_tensors(batch):
    objects = DataProto(non_tensor_batch={"uid": ["a", "b", "c"]})
    assert batch.union(objects).keys() == ["scores", "responses", "answer", "uid"]
    assert objects.union(batch).keys() == ["uid", "scores", "responses", "answer"]
    assert DataProto(meta_info={"y": 1}).union(batch).meta_info == {"y": 1, "temperature": 0.5}
    assert batch.union(DataProto()).equal(batch)


def test_union_compares_tensors_in_meta_info_by_dtype_and_contents():
    ones = DataProto(meta_info={"weights": torch.ones(2)})
    assert ones.union(DataProto(meta_info={"weights": torch.ones(2)})).equal(ones)
    for other in (torch.ones(2).double(), torch.ones(3), torch.zeros(2)):
        with pytest.raises(DataError, match="meta_info 'weights' differs"):
            ones.union(DataProto(meta_info={"weights": other}))


def test_union_of_nan_with_itself_is_no_conflict():
    batch = DataProto({"x": torch.tensor([float("nan"), 1.0])}, {"o": [float("nan"), [np.array([float("nan")])]]})
    assert batch.union(copy.deepcopy(batch)).equal(batch)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto({"scores": torch.zeros(3)}), "both have a column 'scores', with different contents"),
        (DataProto({"scores": torch.tensor([1, 2, 3])}), "both have a column 'scores'"),
        (DataProto(non_tensor_batch={"answer": ["a", ["b"], {"c": 2}]}), "both have a column 'answer'"),
        (DataProto({"responses": torch.zeros(3)}), "both have a column 'responses'"),
        (DataProto({"x": torch.zeros(2)}), "batches with 3 and 2 rows"),
        (DataProto(meta_info={"temperature": 1.0}), "meta_info 'temperature' differs"),
    ],
)
def test_union_refuses_conflicts(batch, other, message):
    with pytest.raises(DataError, match=message):
        batch.union(other)


def test_concat_of_one_of_none_and_of_batches_without_columns(batch):
    assert DataProto.concat([batch]).equal(batch)
    with pytest.raises(DataError, match="nothing to concatenate"):
        DataProto.concat([])
    joined = DataProto.concat([DataProto(meta_info={"x": 1}), batch])
    assert len(joined) == 3
    assert joined.meta_info == {"x": 1, "temperature": 0.5}
    assert len(DataProto.concat([batch[:0], batch, batch[:1]])) == 4


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (DataProto({"x": torch.zeros(1)}), DataProto({"y": torch.zeros(1)}), r"only some of them have \['x', 'y'\]"),
        (DataProto({"x": torch.zeros(1)}), DataProto({"x": torch.zeros(1).long()}), "'x' cannot be concatenated"),
        (DataProto({"x": torch.zeros(1, 2)}), DataProto({"x": torch.zeros(1, 3)}), r"rows, 2\] with .*rows, 3\]"),
        (DataProto({"x": torch.zeros(1)}), DataProto({"x": Ragged.from_list([[1.0]])}), "dense .* with ragged"),
        (DataProto(meta_info={"metrics": {"a": 1}}), DataProto(meta_info={"metrics": {"a": 2}}), "meta_info 'metrics'"),
    ],
)
def test_concat_refuses_unlike_batches(left, right, message):
    with pytest.raises(DataError, match=message):
        DataProto.concat([left, right])


# -- deferred


def test_a_deferred_batch_fetches_once_at_the_first_need(batch):
    calls = []

    def fetch():
        calls.append(1)
        return batch

    handle = DataProto.deferred(fetch)
    assert not handle.is_ready
    assert repr(handle) == "DataProto(deferred)"
    half = handle.batch
    assert not calls
    assert half["scores"].tolist() == [1, 2, 3]
    assert handle.is_ready
    assert handle.materialize() is handle
    assert handle.union(DataProto({"x": torch.zeros(3)})).keys() == ["scores", "responses", "answer", "x"]
    handle["x"] = torch.zeros(3)
    assert pickle.loads(pickle.dumps(handle)).equal(handle)
    assert len(calls) == 1
    assert "x" not in batch


def test_a_deferred_batch_raises_its_error_at_each_need():
    calls = []

    def fetch():
        calls.append(1)
        raise ValueError("worker 1 failed")

    handle = DataProto.deferred(fetch)
    for need in (len, DataProto.keys, DataProto.materialize, lambda b: b["x"], lambda b: b.batch["x"], pickle.dumps):
        with pytest.raises(ValueError, match="worker 1 failed"):
            need(handle)
    assert len(calls) == 1
    assert not handle.is_ready
    with pytest.raises(DataError, match="fetch of a deferred batch returned int"):
        len(DataProto.deferred(lambda: 3))


def test_threads_share_one_fetch(batch):
    calls, start = [], threading.Barrier(4)

    def fetch():
        calls.append(1)
        time.sleep(0.05)
        return batch

    handle = DataProto.deferred(fetch)

    def read():
        start.wait()
        handle.keys()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


# -- arithmetic beside the data


def lengths_and_sum(part):
    return {"length": part["responses"].lengths, "total": part["scores"] + part.meta_info["temperature"]}


def drop_a_row(part):
    return part[1:]


def test_map_gives_new_columns_from_the_columns_read(batch):
    made = batch.map(lengths_and_sum, reads=["responses", "scores"])
    assert made.keys() == ["length", "total"]
    assert made["length"].tolist() == [2, 1, 4]
    assert made["total"].tolist() == [1.5, 2.5, 3.5]
    assert batch.map(DataProto.select, reads=["scores"], keep_together="answer").keys() == ["scores", "answer"]
    with pytest.raises(DataError, match="no column 'length'"):
        batch.map(lengths_and_sum, reads=["length"])
    with pytest.raises(DataError, match="drop_a_row returned 2 rows for 3"):
        batch.map(drop_a_row, reads=["scores"])


def test_masked_moments_by_hand(batch):
    # Kept: 1, 3, 4, 7. Mean 15 / 4; squared deviations 2.75^2 + 0.75^2 + 0.25^2 + 3.25^2 = 18.75.
    batch["mask"] = Ragged.from_list([[1, 0], [1], [1, 0, 0, 1]])
    assert batch.masked_moments("responses", "mask") == Moments(count=4, mean=3.75, var=18.75 / 4)
    batch["some"] = torch.tensor([True, False, True])
    assert batch.masked_moments("scores", "some") == Moments(count=2, mean=2.0, var=1.0)
    none = batch[:0].masked_moments("scores", "some")
    assert none.count == 0
    assert np.isnan(none.mean)
    assert np.isnan(none.var)
    batch["other"] = Ragged.from_list([[1], [1, 0], [1, 0, 0, 1]])
    for mask in ("some", "other"):
        with pytest.raises(DataError, match=f"mask '{mask}' and column 'responses' must have the same shape"):
            batch.masked_moments("responses", mask)


# -- TensorDict


def test_tensordict_round_trip(batch):
    converted = batch.to_tensordict()
    assert isinstance(converted, TensorDict)
    assert converted.batch_size == torch.Size([3])
    assert converted["responses"].is_nested
    assert DataProto.from_tensordict(converted).equal(batch)
    assert DataProto.from_tensordict(batch[:0].to_tensordict()).equal(batch[:0])
    assert DataProto(batch.batch.to_tensordict()).equal(batch.select(non_tensor_batch_keys=[], meta_info_keys=[]))
    assert DataProto.from_tensordict(TensorDict({"x": torch.zeros(2)}, [2]), {"y": 1}).meta_info == {"y": 1}
    batch.meta_info["scores"] = 1
    with pytest.raises(DataError, match=r"\['scores'\], which are both columns and keys of meta_info"):
        batch.to_tensordict()
