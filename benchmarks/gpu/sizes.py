"""The sizes of the parts: model shapes, rows and tokens, on a card and in the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Qwen2 whose output matrix is its embedding."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int = 151_936

    @property
    def decoder_parameters(self) -> int:
        """Weights of all decoder layers' matrices; each takes one multiplication per token."""
        head_size = self.hidden // self.heads
        attention = self.hidden * head_size * (2 * self.heads + 2 * self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head_parameters(self) -> int:
        """Weights of the output matrix."""
        return self.hidden * self.vocabulary


@dataclass(frozen=True)
class Size:
    """One size of the whole benchmark. `device`: "cuda" or "cpu". Lengths are in tokens."""

    device: str
    dtype: str
    half: Shape
    larger: Shape
    prompts: int
    samples: int
    response_len: int
    tail_prompts: int
    tail_mean: int
    tail_limit: int
    head_positions: int
    matrix: int
    copy_bytes: int
    numbers_rows: int

    @property
    def rows(self) -> int:
        """Rows of a GRPO step."""
        return self.prompts * self.samples

    @property
    def is_card(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"


SIZES = {
    "card": Size(
        device="cuda",
        dtype="bf16",
        half=Shape(hidden=896, layers=24, heads=14, key_heads=2, feed_forward=4864),
        larger=Shape(hidden=1536, layers=28, heads=12, key_heads=2, feed_forward=8960),
        prompts=32,
        samples=8,
        response_len=256,
        tail_prompts=64,
        tail_mean=256,
        tail_limit=2048,
        head_positions=16_384,
        matrix=8192,
        copy_bytes=2**32,
        numbers_rows=8,
    ),
    "small": Size(
        device="cpu",
        dtype="fp32",
        half=Shape(hidden=32, layers=2, heads=4, key_heads=2, feed_forward=64, vocabulary=640),
        larger=Shape(hidden=32, layers=3, heads=4, key_heads=2, feed_forward=64, vocabulary=640),
        prompts=2,
        samples=2,
        response_len=8,
        tail_prompts=2,
        tail_mean=4,
        tail_limit=16,
        head_positions=64,
        matrix=64,
        copy_bytes=2**16,
        numbers_rows=2,
    ),
}
"""`small` runs the same code in seconds on a CPU; its figures say nothing."""
