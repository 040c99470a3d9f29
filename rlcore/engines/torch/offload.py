"""Weights and optimizer state leave the device while generation needs it, and come back."""

from __future__ import annotations

import torch
from torch import nn

GB = 1e9


class Parking:
    """Moves what an engine keeps on `device` to main memory and back; on a CPU both are the same place.

    `weights`: whether the module's parameters go too; those that a rollout engine shares have to stay.
    """

    def __init__(
        self, root: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, *, weights: bool
    ) -> None:
        self._root, self._optimizer, self._device, self._weights = root, optimizer, device, weights
        self.is_parked = False
        self.metrics: dict[str, float] = {}

    def park(self) -> None:
        """Move all to main memory, and note in `metrics` what was on the device before and after, in GB."""
        if self.is_parked:
            return
        before = self._allocated()
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)  # the last step's, which nothing reads again
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # or the allocator keeps it from the rollout engine's own
        self.is_parked = True
        self.metrics = {"memory/before_parking_gb": before, "memory/parked_gb": self._allocated()}

    def unpark(self) -> None:
        """Move all back."""
        if self.is_parked:
            self._move(self._device)
            self.is_parked = False

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        if self._weights:
            self._root.to(device)  # FSDP2 knows its shards again after that
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            for key, value in state.items():
                state[key] = value.to(device)

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated(self._device) / GB if self._device.type == "cuda" else 0.0
