"""What verl's documentation names: the imports, padding, and pools cut into parts. Groups are in tests/workers."""

from __future__ import annotations

import pytest
import torch

import rlcore
from rlcore import compat
from rlcore.compat import DataProto, pad_dataproto_to_divisor, split_resource_pool, unpad_dataproto
from rlcore.errors import ConfigError, DataError
from rlcore.workers import ClassWithInitArgs, ResourcePool


def test_the_names_that_rlcore_has_too_are_the_same_objects() -> None:
    assert issubclass(compat.DataProto, rlcore.DataProto)
    assert compat.RayClassWithInitArgs is ClassWithInitArgs
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_padding_by_hand() -> None:
    batch = DataProto.from_dict({"scores": torch.tensor([1.0, 2.0, 3.0])})
    padded, pad_size = pad_dataproto_to_divisor(batch, 8)
    assert pad_size == 5
    assert padded["scores"].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert unpad_dataproto(padded, pad_size).equal(batch)
    empty, pad_size = pad_dataproto_to_divisor(batch[:0], 4)
    assert (len(empty), pad_size) == (0, 0)
    with pytest.raises(DataError, match="cannot remove 4 rows of padding from a batch of 3 rows"):
        unpad_dataproto(batch, 4)
    with pytest.raises(DataError, match="size_divisor must be"):
        pad_dataproto_to_divisor(batch, 0)


def test_a_pool_is_cut_into_parts_of_one_size_or_of_the_sizes_listed() -> None:
    assert [part.world_size for part in split_resource_pool(ResourcePool([4]), 2)] == [2, 2]
    assert [part.world_size for part in split_resource_pool(ResourcePool([4]), [1, 3])] == [1, 3]


@pytest.mark.parametrize("size", [3, 5, 0, -1])
def test_a_number_that_does_not_divide_the_pool(size: int) -> None:
    with pytest.raises(ConfigError, match="add up to the pool's 4 places"):
        split_resource_pool(ResourcePool([4]), size)
