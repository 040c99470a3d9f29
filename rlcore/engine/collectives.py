"""The processes of one engine, and the gather of small values for its bookkeeping."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")

INLINE_BYTES = 4096
"""Largest size of a gathered value that takes one collective, in bytes."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the engine's. With `world_size` 1 no process group exists and nothing is sent."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` (small and picklable), in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        mine = pickle.dumps(value)
        # Almost all values are small and take one collective; torch's gather of objects always takes two.
        everyone = self._gather_bytes(mine, INLINE_BYTES)
        sizes = [int.from_bytes(each[:8], "little") for each in everyone]
        if 8 + max(sizes) > INLINE_BYTES:
            everyone = self._gather_bytes(mine, 8 + max(sizes))
        return [pickle.loads(each[8 : 8 + size]) for each, size in zip(everyone, sizes, strict=True)]

    def _gather_bytes(self, mine: bytes, room: int) -> list[bytes]:
        """Return `room` bytes of each rank: the length of its value in 8 bytes, then the value, cut or padded."""
        framed = (len(mine).to_bytes(8, "little") + mine)[:room].ljust(room, b"\0")
        sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(sent) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, sent)
        return [part.cpu().numpy().tobytes() for part in parts]
