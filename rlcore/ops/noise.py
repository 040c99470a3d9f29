"""Random numbers from keys: the same key and position give the same number on every machine and rank.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, doi 10.1145/2660193.2660195) used as a counter-based
one: number i of a key is mix(key + (i + 1) * golden).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def noise_key(*parts: str | int) -> int:
    """Return a 64-bit key, as a signed integer, for a tuple of names and numbers; ("a", "b") and ("ab",) differ."""
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch's shift of signed integers copies the sign bit; the mask clears the copies.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(keys: Tensor, start: int | Tensor, length: int) -> Tensor:
    """Return int64 [rows, length], all 64 bits random: see `uniform_noise`, which makes its numbers of the upper 53."""
    first = start[:, None] if isinstance(start, Tensor) else start
    index = first + torch.arange(1, 1 + length, dtype=torch.int64, device=keys.device)[None, :]
    x = keys[:, None] + index * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform_noise(keys: Tensor, start: int | Tensor, length: int) -> Tensor:
    """Return fp64 [rows, length] in [0, 1): numbers start .. start + length - 1 of each key in int64 [rows].

    `start` is one number for all rows, or int64 [rows].
    """
    return _shift_right(random_bits(keys, start, length), 11).double() * 2.0**-53
