"""The processes of one engine: who they are, and the few collectives that its bookkeeping needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


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
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values
