"""The algebra of DataProto, over batches that mix all kinds of columns, zero rows included."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.protocol import DataProto, Ragged

quick = settings(deadline=None, max_examples=40, database=None)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


def tensor(count, trailing, dtype):
    """Different, exactly representable values in each entry."""
    size = count * int(np.prod(trailing))
    return (torch.arange(size) % 100).reshape(count, *trailing).to(dtype)


@st.composite
def batches(draw, min_rows=0):
    rows = draw(st.integers(min_rows, 6))
    batch = DataProto(meta_info=draw(st.dictionaries(st.text(max_size=2), json_values, max_size=2)))
    batch["row"] = torch.arange(rows)
    for number in range(draw(st.integers(0, 2))):
        trailing = draw(st.sampled_from([(), (3,), (2, 0), (2, 2)]))
        batch[f"dense{number}"] = tensor(rows, trailing, draw(dtypes))
    for number in range(draw(st.integers(0, 2))):
        lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        values = tensor(sum(lengths), draw(st.sampled_from([(), (2,)])), draw(dtypes))
        batch[f"ragged{number}"] = Ragged.from_lengths(values, torch.tensor(lengths, dtype=torch.int64))
    for number in range(draw(st.integers(0, 2))):
        batch[f"object{number}"] = draw(st.lists(json_values, min_size=rows, max_size=rows))
    return batch


@quick
@given(batches(), st.integers(1, 8))
def test_chunk_then_concat_is_identity(batch, chunks):
    parts = batch.chunk(chunks, uneven=True)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert DataProto.concat(parts).equal(batch)


@quick
@given(batches(min_rows=1), st.integers(1, 8))
def test_split_then_concat_is_identity(batch, size):
    parts = batch.split(size, uneven=True)
    assert all(len(part) == size for part in parts[:-1])
    assert DataProto.concat(parts).equal(batch)


@quick
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_by_a_permutation_and_its_inverse_is_identity(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    inverse = np.argsort(np.array(order, dtype=np.int64))
    reordered = batch.reorder(order)
    assert reordered["row"].tolist() == order
    assert reordered.reorder(inverse).equal(batch)


@quick
@given(batches(), st.integers(1, 4))
def test_repeat_then_select_is_identity(batch, times):
    assert batch.repeat(times)[::times].equal(batch)
    assert batch.repeat(times, interleave=False)[: len(batch)].equal(batch)
    assert batch.repeat(times).equal(batch.sample_level_repeat([times] * len(batch)))


@quick
@given(batches(), st.integers(1, 8))
def test_pad_then_unpad_is_identity(batch, divisor):
    from rlcore.compat import pad_dataproto_to_divisor, unpad_dataproto  # it imports Ray

    padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert unpad_dataproto(padded, pad_size).equal(batch)


@quick
@given(batches(), st.data())
def test_every_way_of_naming_rows_agrees(batch, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    numbers = [row for row, kept in enumerate(mask) if kept]
    kept = batch[numbers]
    assert kept["row"].tolist() == numbers
    for index in (
        mask,
        np.array(mask, dtype=bool),
        torch.tensor(mask, dtype=torch.bool),
        np.array(numbers, dtype=np.int32),
        torch.tensor(numbers, dtype=torch.int32),
        [row - len(batch) for row in numbers],
    ):
        assert batch[index].equal(kept)
    assert batch[1:4].equal(batch[list(range(*slice(1, 4).indices(len(batch))))])
    assert batch[::-2].equal(batch[list(range(*slice(None, None, -2).indices(len(batch))))])


@quick
@given(batches())
def test_union_puts_back_what_select_took_apart(batch):
    tensors = batch.select(non_tensor_batch_keys=[], meta_info_keys=[])
    objects = batch.select(batch_keys=[])
    assert tensors.union(objects).equal(batch)
    assert objects.union(tensors).equal(batch)


@quick
@given(batches())
def test_pickle_round_trip(batch):
    buffers = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    # An object store hands back read-only memory, as these bytes are.
    for copy in (pickle.loads(stream, buffers=[bytes(b) for b in buffers]), pickle.loads(pickle.dumps(batch))):
        assert copy.equal(batch)
        names = copy.batch.keys()
        for name in names:
            value = copy.view(name)
            (value.values if isinstance(value, Ragged) else value).zero_()


@quick
@given(batches())
def test_disk_round_trip(batch):
    with tempfile.TemporaryDirectory() as folder:
        batch.save_to_disk(Path(folder) / "batch")
        assert DataProto.load_from_disk(Path(folder) / "batch").equal(batch)


@quick
@given(batches())
def test_operations_leave_their_batch_alone(batch):
    before = pickle.loads(pickle.dumps(batch))
    derived = [
        batch.select(),
        batch[:],
        *batch.chunk(2, uneven=True),
        batch.repeat(2),
        batch.union(batch),
        batch.to("cpu"),
    ]
    derived.append(DataProto.concat([batch]))
    for other in derived:
        names = other.batch.keys()
        for name in names:
            other[name] = torch.full((len(other),), 7)
        other["new"] = [0] * len(other)
        other.meta_info["new"] = 1
    assert batch.equal(before)
