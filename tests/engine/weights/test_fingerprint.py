"""Checksums: by an independent implementation, over parts, and of changed tensors."""

import struct

import pytest
import torch

from rlcore.engine.weights.fingerprint import checksum, differences, sum_checksums

MASK = 2**64 - 1


def factor(dim: int, index: int) -> int:
    """Return the factor of a position by SplitMix64 in Python's integers."""
    x = (dim + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) | 1


def by_hand(tensor: torch.Tensor) -> int:
    total = 0
    for place in torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(-1, tensor.dim()).tolist():
        (bits,) = struct.unpack("<i", struct.pack("<f", float(tensor[tuple(place)])))
        for dim, index in enumerate(place):
            bits *= factor(dim, index)
        total += bits
    return total & MASK


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_the_sum_of_bits_times_factors_of_their_positions(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert checksum(tensor) == by_hand(tensor)
    assert checksum(tensor) == checksum(tensor.float())
    assert checksum(torch.nn.Parameter(tensor)) == checksum(tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor)


def test_a_number_without_dimensions_counts_as_one_element():
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5])) == (0x3FC00000 * factor(0, 0)) & MASK


def test_checksums_of_parts_add_up():
    """Parts along either dimension, along both, and empty ones."""
    whole = torch.randn(7, 6, generator=torch.Generator().manual_seed(2))
    place = torch.empty(whole.shape, device="meta")
    expected = checksum(whole)

    def parts(tensor):
        quarters = [rows.chunk(2, 1) for rows in tensor.chunk(3)]
        return [tensor.chunk(3), tensor.chunk(2, 1), [*quarters[0], *quarters[1], *quarters[2]], (tensor, tensor[:0])]

    for some, places in zip(parts(whole), parts(place), strict=True):
        own = [{"a": checksum(part, at)} for part, at in zip(some, places, strict=True)]
        assert len(own) > 1
        assert sum_checksums([{"b": 3}, *own]) == {"b": 3, "a": expected}
    assert checksum(whole[3:], place[:4]) != checksum(whole[3:], place[3:])


def test_a_large_parameter_is_summed_a_few_rows_at_a_time():
    """Of 2**24 elements and a few rows; its parts are summed in one piece."""
    whole = torch.randn(2**12 + 3, 2**12, generator=torch.Generator().manual_seed(3))
    place = torch.empty(whole.shape, device="meta")
    parts = [{"a": checksum(part, at)} for part, at in zip(whole.chunk(4, 1), place.chunk(4, 1), strict=True)]
    assert sum_checksums(parts)["a"] == checksum(whole)


def test_every_changed_bit_and_every_swap_changes_the_checksum():
    """Of weights that many models have: ones, of which few bits differ, and small numbers."""
    tensor = torch.cat([torch.ones(6), torch.full((3,), 2.0), 0.02 * torch.arange(3)]).view(4, 3)
    seen = {checksum(tensor)}
    for element in range(12):
        for bit in range(32):
            other = tensor.clone()
            other.view(torch.int32).view(-1)[element] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(checksum(other))
    assert len(seen) == 1 + 12 * 32
    for one in range(12):
        for two in range(one):
            other = tensor.clone().view(-1)
            other[[one, two]] = other[[two, one]]
            assert (checksum(other.view(4, 3)) in seen) == (other[one] == other[two])
    assert checksum(tensor.roll(1, 0)) not in seen
    assert checksum(tensor.mT) not in seen


def test_differences_name_parameters():
    ones = dict.fromkeys("abcdefg", 1)
    assert differences(ones, dict(ones)) == ""
    assert differences({**ones, "c": 2}, ones) == "1 of 7 parameters differ: c"
    assert differences({"a": 1}, {"a": 1, "b": 1}) == "1 of 2 parameters differ: b"
    assert differences({"a": 1, "b": 1}, {"a": 1}) == "1 of 1 parameters differ: b"
    assert differences({}, ones) == "7 of 7 parameters differ: a, b, c, d, e"
