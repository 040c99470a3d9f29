"""Noise by name: reproducible, uniform, different for every name."""

import pytest
import torch

from rlcore.ops import noise_key, uniform_noise


def test_the_first_numbers_are_those_of_splitmix64():
    # Reference outputs of SplitMix64 seeded with 1234567 (Rosetta Code, "Pseudo-random numbers/Splitmix64").
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    got = uniform_noise(torch.tensor([1234567]), 0, 5)[0]
    assert got.tolist() == [(value >> 11) * 2.0**-53 for value in want]


def test_a_later_start_continues_the_same_row():
    keys = torch.tensor([noise_key("a", 1), noise_key("b", 1)])
    whole = uniform_noise(keys, 0, 10)
    assert torch.equal(uniform_noise(keys, 4, 6), whole[:, 4:])
    assert torch.equal(uniform_noise(keys[1:], 0, 10), whole[1:])


def test_keys_tell_names_numbers_and_boundaries_apart():
    keys = [
        noise_key(*parts)
        for parts in [("a", "b"), ("ab",), ("a", "b", ""), ("1",), (1,), ("b", "a"), (0, 11), (0, 1, 1)]
    ]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_numbers_are_uniform_and_rows_unrelated():
    noise = uniform_noise(torch.tensor([noise_key("seed", i) for i in range(2000)]), 0, 50)
    assert noise.min() >= 0
    assert noise.max() < 1
    # Mean of 100,000 uniforms: standard error 0.2887 / sqrt(100000) = 0.0009; four of them.
    assert noise.mean().item() == pytest.approx(0.5, abs=0.0037)
    assert torch.histc(noise.float(), 10, 0, 1).tolist() == pytest.approx([10_000] * 10, abs=400)
    rows = torch.corrcoef(noise[:20])
    assert (rows - torch.eye(20)).abs().max() < 0.65
