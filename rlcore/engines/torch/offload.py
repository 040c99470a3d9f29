"""Offload weights and optimizer state to main memory while generation needs the device."""

from __future__ import annotations

import torch
from torch import nn

GB = 1e9


class Offloader:
    """Moves an engine's weights and optimizer state from `device` to main memory and back; on a CPU nothing moves.

    `weights` False keeps the module's parameters on the device: a rollout engine shares them.
    """

    def __init__(
        self, root: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, *, weights: bool
    ) -> None:
        self._root, self._optimizer, self._device, self._weights = root, optimizer, device, weights
        self.is_offloaded = False
        self.metrics: dict[str, float] = {}

    def offload(self) -> None:
        """Move all to main memory. `metrics` then holds the memory allocated on the device before and after, in GB."""
        if self.is_offloaded:
            return
        before = self._allocated()
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)  # nothing reads the last step's gradients again
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            # Otherwise torch's allocator keeps the freed blocks, and the rollout engine may not get them.
            torch.cuda.empty_cache()
        self.is_offloaded = True
        self.metrics = {"memory/before_offload_gb": before, "memory/offloaded_gb": self._allocated()}

    def onload(self) -> None:
        """Move all back to the device."""
        if self.is_offloaded:
            self._move(self._device)
            self.is_offloaded = False

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        if self._weights:
            self._root.to(device)  # afterwards FSDP2 finds its shards again
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            for key, value in state.items():
                state[key] = value.to(device)

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated(self._device) / GB if self._device.type == "cuda" else 0.0
