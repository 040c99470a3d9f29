"""Attention of one query position in one Triton kernel, which also stores the new keys and values; for bf16 on CUDA.

Flash attention needs the new keys in the cache, and its queries and results in another order: six kernels a layer where
two do. With few rows the columns of a row are divided among several programs, whose results a second kernel combines
(flash-decoding, https://pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from rlcore.engines.hf.static_decode import Attend, Heads, masked_attention

LOG2_E = 1.4426950408889634
BLOCK_NUMBERS, MOST_COLUMNS = 2**13, 128
"""Numbers of the keys, and of the values, that a program reads at a time, and the most columns."""
PROGRAMS, MOST_PARTS = 128, 16
"""Programs that keep a card busy, and the largest number of parts that a row's columns are divided into.

On an H100, with two key heads, at position 2,000: 64 rows take 27 us in one part and 33 in four; 8 rows take 17 us in
one part and 11 in sixteen.
"""


@triton.jit  # type: ignore[untyped-decorator]
def _columns_of_part(position, parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of columns of each of a row's parts but the last, which has the rest."""
    return tl.maximum(tl.cdiv(tl.cdiv(position, BLOCK), parts), 1) * BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_part(  # type: ignore[no-untyped-def]
    rotated,
    values,
    cache,
    positions,
    read,
    maxima,
    scale,
    width,
    rotated_stride,
    values_stride,
    parts,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Attend with the queries of one key head of one row to one part of the row's columns.

    The first part also has the new column, which it stores. `scale` has a factor of log2(e), so that powers are of 2.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    group, along = tl.arange(0, PADDED), tl.arange(0, SIZE)
    real = (group < GROUP)[:, None]
    new = rotated + row * rotated_stride
    queries = tl.load(new + (head * GROUP + group)[:, None] * SIZE + along[None, :], mask=real, other=0.0)
    columns = cache + row * width * (2 * KEYS * SIZE) + head * SIZE
    high = tl.full([PADDED], float("-inf"), tl.float32)
    mass = tl.zeros([PADDED], tl.float32)
    total = tl.zeros([PADDED, SIZE], tl.float32)
    if part == 0:
        key = tl.load(new + (QUERIES + head) * SIZE + along)
        value = tl.load(values + row * values_stride + head * SIZE + along)
        own = columns + position.to(tl.int64) * (2 * KEYS * SIZE) + along
        tl.store(own, key)
        tl.store(own + KEYS * SIZE, value)
        high = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        mass = tl.full([PADDED], 1.0, tl.float32)
        total += value.to(tl.float32)[None, :]
    size = _columns_of_part(position, parts, BLOCK)
    begin = part * size
    end = tl.minimum(position, begin + size)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        seen = column < end
        at = columns + column.to(tl.int64)[:, None] * (2 * KEYS * SIZE) + along[None, :]
        keys = tl.load(at, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
        peak = tl.maximum(high, tl.max(scores, 1))
        powers, fall = tl.exp2(scores - peak[:, None]), tl.exp2(high - peak)
        old = tl.load(at + KEYS * SIZE, mask=seen[:, None], other=0.0)
        total = total * fall[:, None] + tl.dot(powers.to(old.dtype), old)
        mass, high = mass * fall + tl.sum(powers, 1), peak
    if WHOLE:
        at = read + (row * QUERIES + head * GROUP + group)[:, None] * SIZE + along[None, :]
        tl.store(at, (total / mass[:, None]).to(read.dtype.element_ty), mask=real)
    elif (begin < end) | (part == 0):
        place = ((row * KEYS + head) * parts + part) * PADDED + group
        tl.store(read + place[:, None] * SIZE + along[None, :], total)
        tl.store(maxima + 2 * place, high)
        tl.store(maxima + 2 * place + 1, mass)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_parts(  # type: ignore[no-untyped-def]
    read,
    maxima,
    positions,
    out,
    parts,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the parts of one key head of one row, each relative to the highest score of all."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    group, along = tl.arange(0, PADDED), tl.arange(0, SIZE)
    high = tl.full([PADDED], float("-inf"), tl.float32)
    mass = tl.zeros([PADDED], tl.float32)
    total = tl.zeros([PADDED, SIZE], tl.float32)
    used = tl.maximum(tl.cdiv(position, _columns_of_part(position, parts, BLOCK)), 1)
    for part in range(0, used):
        place = ((row * KEYS + head) * parts + part) * PADDED + group
        its_high, its_mass = tl.load(maxima + 2 * place), tl.load(maxima + 2 * place + 1)
        peak = tl.maximum(high, its_high)
        fall, its_fall = tl.exp2(high - peak), tl.exp2(its_high - peak)
        its_total = tl.load(read + place[:, None] * SIZE + along[None, :])
        total = total * fall[:, None] + its_total * its_fall[:, None]
        mass, high = mass * fall + its_mass * its_fall, peak
    at = out + (row * QUERIES + head * GROUP + group)[:, None] * SIZE + along[None, :]
    tl.store(at, (total / mass[:, None]).to(out.dtype.element_ty), mask=(group < GROUP)[:, None])


def parts_of(rows: int, keys: int) -> int:
    """Return the number of parts that the columns of `rows` rows with `keys` key heads are divided into."""
    return max(1, min(MOST_PARTS, PROGRAMS // (rows * keys)))


def columns_of_block(size: int) -> int:
    """Return the number of columns that a program reads at a time, for heads of a size."""
    return max(16, min(MOST_COLUMNS, BLOCK_NUMBERS // size))


def attend_and_store(
    rotated: Tensor, values: Tensor, cache: Tensor, positions: Tensor, scale: float, parts: int
) -> Tensor:
    """Store the new keys and values in a layer's cache, and return the attention [rows, query heads, size].

    `rotated` [rows, query heads + key heads, size] holds the queries and the new keys, `values` [rows, key heads, size]
    the new values, each row contiguous. `cache` [rows, width, 2, key heads, size] gets them at `positions` int64
    [rows]; each row attends to all columns up to there. `parts`: of a row's columns. Raises ValueError for a `size`
    that is not a power of 2 from 16 on, and RuntimeError where Triton cannot compile.
    """
    rows, heads, size = rotated.shape
    if size < 16 or size & (size - 1):
        raise ValueError(f"heads of size {size} do not fit the attention kernel, which needs a power of 2 from 16 on")
    keys = values.shape[1]
    queries = heads - keys
    out = rotated.new_empty(rows, queries, size)
    group = queries // keys
    shape = {"QUERIES": queries, "KEYS": keys, "SIZE": size, "GROUP": group, "BLOCK": columns_of_block(size)}
    padded = max(16, 1 << (group - 1).bit_length())  # the fewest rows of a product on tensor cores
    whole = parts == 1
    read = out if whole else out.new_empty(rows, keys, parts, padded, size, dtype=torch.float32)
    maxima = out if whole else read.new_empty(rows, keys, parts, padded, 2)
    fixed = (scale * LOG2_E, cache.shape[1], rotated.stride(0), values.stride(0), parts)
    try:
        _attend_to_part[(rows, keys, parts)](
            rotated, values, cache, positions, read, maxima, *fixed, **shape, PADDED=padded, WHOLE=whole
        )
        if not whole:
            _combine_parts[(rows, keys)](read, maxima, positions, out, parts, **shape, PADDED=padded)
    except TritonError as error:  # no RuntimeError, as torch's own are
        raise RuntimeError(f"Triton cannot run the attention kernel: {error}") from error
    return out


def kernel_attention(positions: Tensor, width: int, heads: Heads, dtype: torch.dtype) -> Attend:
    """Return attention for rows at `positions` int64 [rows] by the kernel; see masked_attention."""
    parts = parts_of(len(positions), heads.keys)

    def attend(rotated: Tensor, values: Tensor, cache: Tensor) -> Tensor:
        return attend_and_store(rotated, values, cache, positions, heads.scale, parts)

    return attend


def largest_error(heads: Heads, device: torch.device) -> float:
    """Return the largest difference to masked attention, for few and for many rows of random bf16 numbers.

    It is inf if the cache differs.
    """
    numbers, width, worst = torch.Generator(device).manual_seed(0), 3 * columns_of_block(heads.size), 0.0

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, device=device).bfloat16()

    for rows in (4, PROGRAMS // heads.keys):
        positions = torch.arange(rows, device=device) * 37 % width
        rotated = random(rows, heads.queries + heads.keys, heads.size)
        values = random(rows, heads.queries, heads.size)[:, : heads.keys]
        caches = [random(rows, width, 2, heads.keys, heads.size)]
        caches.append(caches[0].clone())
        want = masked_attention(positions, width, heads, torch.bfloat16)(rotated, values, caches[0])
        got = kernel_attention(positions, width, heads, torch.bfloat16)(rotated, values, caches[1])
        worst = max(worst, float((got - want).abs().max()) if torch.equal(*caches) else float("inf"))
    return worst
