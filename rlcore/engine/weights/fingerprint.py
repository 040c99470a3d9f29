"""Fingerprints of weights, which prove that the weights that sample are those that were trained.

A fingerprint is a dict from the Hugging Face name of each parameter (tied ones once) to its checksum: the sum, modulo
2**64, of its elements' bits in fp32 as integers, each times an odd number that depends on the element's position in the
whole parameter. So the checksums of shards add up to that of the whole, and ranks compare weights without gathering
them. A changed element always changes the checksum; a permutation of elements goes unnoticed with a probability of
about 2**-40. Numbers in bf16 have the same checksum as the same numbers in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.ops.noise import random_bits

CHECK_EVERY = 47
"""Switches of weights from one check to the next; the first is checked. A prime: checks do not keep step with a period
of the run, such as switches that a rollout pool skips. No config key: rarer checks save nothing that can be measured.
"""


def checksum(tensor: Tensor, place: Tensor | None = None) -> int:
    """Return the checksum of a parameter, or of a part of one; those of all parts add up modulo 2**64.

    place: the same part of any tensor with the whole parameter's shape, as a view. Only its offset and strides are
    read, so it may be on the device "meta". None: `tensor` is whole.
    """
    tensor = torch.atleast_1d(tensor.detach())
    place = torch.atleast_1d(torch.empty(tensor.shape, device="meta") if place is None else place)
    offset, factors = place.storage_offset(), []
    for dim, (size, stride) in enumerate(zip(tensor.shape, place.stride(), strict=True)):
        start, offset = divmod(offset, stride)
        factors.append(random_bits(torch.tensor([dim], device=tensor.device), start, size)[0] | 1)
    # Widened to 64 bits a few rows at a time: a whole embedding would take much memory.
    total, rows = 0, max(1, 2**24 // max(1, tensor[:1].numel()))
    for some, first in zip(tensor.split(rows), factors[0].split(rows), strict=True):
        sums = some.float().view(torch.int32).long()
        for factor in (*reversed(factors[1:]), first):
            # CUDA has no product of integer matrices; on a CPU it is several times as fast.
            sums = sums @ factor if sums.is_cpu else (sums * factor).sum(-1)
        total += int(sums)
    return total % 2**64


def sum_checksums(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the fingerprint of whole parameters from those of all their parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) % 2**64 for name in names}


def differences(found: dict[str, int], expected: dict[str, int]) -> str:
    """Return how many parameters differ and the first five of them, for an error; "" if none does."""
    wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return f"{len(wrong)} of {len(expected)} parameters differ: {', '.join(wrong[:5])}" if wrong else ""
