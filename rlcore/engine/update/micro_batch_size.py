"""`engine.micro_batch_tokens=auto`: the tokens of a micro-batch, from the memory that two small ones take on a GPU.

See docs/decisions/0032-measured-micro-batches.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rlcore.engine.generators import random_state, set_random_state
from rlcore.ops import Need
from rlcore.protocol import DataProto, Ragged

if TYPE_CHECKING:
    from rlcore.engine.train import TrainEngine

log = logging.getLogger(__name__)

UNMEASURED_TOKENS = 16384
"""The number of `auto` on a CPU, where nothing is measured."""
SATURATING_TOKENS = 8192
"""Largest measured number for a model of 1.5 billion parameters and more; see `enough_tokens`.

A micro-batch reads the weights and adds to the gradients once: about 12 to 20 bytes a parameter, whatever its size.
A token costs 6 floating-point operations a parameter. At an H100's 3 TB/s and 400 TFLOP/s the first takes as long as
270 to 440 tokens: 3 to 5 % of 8,192 tokens, 2 to 3 % of 16,384.
"""
MOST_TOKENS = 32768
"""Largest measured number for any model."""
ENOUGH_WORK = 1.2e13
"""Parameters times tokens of a micro-batch that keeps a GPU busy while the host launches the next kernels.

Beside an H100 the host takes 70 to 100 ms to launch a micro-batch of 24 layers, whatever its size (docs/gpu.md). This
much work takes the card 200 ms, at 6 operations for each and 350 TFLOP/s.
"""
SMALLEST_TOKENS = 256
PROBE_TOKENS = 4096
"""Tokens of the larger of the two measured micro-batches; the other has half of them."""
PROBE_ROW = 128
"""Tokens of a row of a measured micro-batch: every model has that many positions."""
LARGEST_PROBE = PROBE_TOKENS // PROBE_ROW, PROBE_TOKENS
"""Rows and tokens of the larger measured micro-batch."""
Peak = Callable[[Callable[[], None]], int]
"""Runs a function and returns the most bytes that were allocated on the device while it ran."""


@dataclass(frozen=True)
class MicroBatchSize:
    """The result of a measurement.

    tokens: the most tokens in one forward, a power of two, equal on all ranks of the role.
    place: the card and the layout that it is for.
    reason: the figures behind it, in words.
    """

    tokens: int
    place: str
    reason: str


@dataclass(frozen=True)
class MemoryLine:
    """The bytes that a micro-batch takes: `fixed`, with the gradients of an engine that trains, and `per_token`."""

    fixed: float
    per_token: float

    @staticmethod
    def through(small: tuple[int, int], large: tuple[int, int]) -> MemoryLine:
        """Return the line through two measured points (tokens, bytes)."""
        (tokens, size), (more, larger) = small, large
        per_token = max(0.0, (larger - size) / (more - tokens))
        return MemoryLine(max(0.0, size - per_token * tokens), per_token)

    def bytes(self, tokens: int) -> float:
        """Return the bytes of a micro-batch of this many tokens."""
        return self.fixed + self.per_token * tokens

    def fitting(self, free: float, most: int = SATURATING_TOKENS) -> int:
        """Return the most tokens that fit into `free` bytes: a power of two, 256 to `most`.

        A power of two, as it does not change with a few free bytes more or less.
        """
        tokens = most
        while tokens > SMALLEST_TOKENS and self.bytes(tokens) > free:
            tokens //= 2
        return tokens


def enough_tokens(parameters: int) -> int:
    """Return the tokens of a micro-batch beyond which a GPU gains nothing: a power of two, 8,192 to 32,768.

    parameters: those of the model's part on one GPU. Of a mixture of experts a token passes fewer.
    """
    tokens = SATURATING_TOKENS
    while tokens < MOST_TOKENS and tokens * parameters < ENOUGH_WORK:
        tokens *= 2
    return tokens


def micro_batch_limit(given: Literal["auto"] | int, *, gpu: bool) -> int:
    """Return the number of `engine.micro_batch_tokens` before anything is measured; of `auto` one for large models."""
    if given != "auto":
        return given
    return SATURATING_TOKENS if gpu else UNMEASURED_TOKENS


def measure(engine: TrainEngine, peak: Peak, most: int = PROBE_TOKENS) -> MemoryLine:
    """Run forward, and backward if the engine trains, on two synthetic micro-batches of up to `most` tokens.

    All ranks call it together. It goes through the engine's own `forward` and `forward_backward` and leaves no trace:
    gradients are dropped, the weights and the random state stay. If memory runs out, a single rank tries again with a
    quarter of the tokens. Raises torch.OutOfMemoryError where that is not possible.
    """
    state = random_state()
    try:
        while True:
            try:
                return _measured(engine, peak, most)
            except torch.OutOfMemoryError:
                # Other ranks wait in collectives of the size that failed here.
                if engine.ranks.world_size > 1 or most // 4 < 2 * SMALLEST_TOKENS:
                    raise
            _drop_gradients(engine)
            log.info("a micro-batch of %d tokens does not fit: measuring with %d", most, most // 4)
            most //= 4
    finally:
        _drop_gradients(engine)
        set_random_state(state)


def _drop_gradients(engine: TrainEngine) -> None:
    if engine.trains:
        engine.zero_grad()


def _measured(engine: TrainEngine, peak: Peak, most: int) -> MemoryLine:
    before = peak(lambda: None)
    points: list[tuple[int, int]] = []
    for tokens in (most // 2, most):
        # The first run allocates what stays: gradients, which later micro-batches add to, and kernels' work space.
        _run(engine, tokens)
        points.append((tokens, peak(partial(_run, engine, tokens)) - before))
    return MemoryLine.through(*points)


def _run(engine: TrainEngine, tokens: int) -> None:
    parts = [synthetic_rows(tokens, engine.vocab_size)] * engine.layout.pp  # a pipeline holds one for each stage
    needs: tuple[Need, ...] = tuple(name for name in engine.kind.gives if name != "logits")

    def finish(part: DataProto | None, outputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([value.float().mean() for value in outputs.values()]).sum()

    if engine.trains:
        engine.forward_backward(parts, needs, finish, last=True)
    else:
        engine.forward(parts, needs, finish)


def synthetic_rows(tokens: int, vocab: int) -> DataProto:
    """Return rows of made-up tokens, `tokens` in all (a multiple of 128), with the columns that a model reads.

    Each row is one token of prompt and then response, so that a head has work at every token: the most that a real
    micro-batch can have. No two rows begin alike, so an engine that shares prompts computes them all.
    """
    rows = [(torch.arange(PROBE_ROW) * 7 + 13 * index) % vocab for index in range(tokens // PROBE_ROW)]
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([row[:1] for row in rows]),
            "responses": Ragged.from_list([row[1:] for row in rows]),
        }
    )


def place_of(engine: TrainEngine, card: str) -> str:
    """Return the cards of all ranks and the layout, in words: a measurement holds for these. All ranks call it."""
    layout, cards = engine.layout, dict.fromkeys(engine.ranks.gather(card))
    return f"{' and '.join(cards)}, pp={layout.pp} tp={layout.tp} dp={layout.dp} shard={engine.mesh.shards}"


def choose(
    line: MemoryLine,
    free: float,
    longest: int,
    place: str,
    everyone: Callable[[int], list[int]],
    most: int = SATURATING_TOKENS,
) -> MicroBatchSize:
    """Return the size for `free` bytes: the smallest over all ranks, which `everyone` gathers, and at most `most`.

    longest: the most tokens that a row of the run may have. A row is never cut, so the reason says if it may not fit.
    """
    tokens = min(everyone(line.fitting(free, most)))
    reason = (
        f"measured: {line.per_token / 1e6:.2f} MB a token and {line.fixed / 1e9:.1f} GB, of {free / 1e9:.1f} GB free"
    )
    if line.bytes(max(longest, tokens)) > free:
        reason += f"; a micro-batch of {max(longest, tokens)} tokens, as a row may have, would not fit"
    return MicroBatchSize(tokens, place, reason)
