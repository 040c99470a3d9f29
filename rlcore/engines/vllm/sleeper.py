"""vLLM asleep: its weights, keys and values leave the GPU while the same GPU trains."""

from __future__ import annotations

import time
from typing import Any

import torch

from rlcore.errors import DataError

GB = 1e9
PARTS = ("weights", "kv_cache")
"""vLLM's tags of the memory that it wakes by itself."""


class Sleeper:
    """Puts an engine of vLLM to sleep, and wakes its weights and its cache one after the other.

    Nothing is kept: the weights have to be loaded again after waking, and the prefix cache is empty. On a CPU vLLM
    makes the same calls and frees nothing. `metrics` are of the last sleep and the waking after it.
    """

    def __init__(self, llm: Any, device: torch.device) -> None:
        self._llm, self._device = llm, device
        self._asleep: set[str] = set()
        self._freed = 0
        self.metrics: dict[str, float] = {}

    def sleep(self) -> None:
        """Free weights, keys and values; without effect while all of them are asleep."""
        if len(self._asleep) == len(PARTS):
            return
        for part in sorted(self._asleep):
            self.wake(part)  # vLLM refuses to sleep, and frees nothing, while a part of it sleeps
        start, before = time.perf_counter(), self._free()
        self._llm.sleep(level=2)
        self._asleep = set(PARTS)
        self._freed = max(0, self._free() - before)
        self.metrics = {
            "time/rollout_sleep": time.perf_counter() - start,
            "time/rollout_wake": 0.0,
            "memory/rollout_sleep_freed_gb": self._freed / GB,
        }

    def wake(self, tag: str) -> None:
        """Take the memory of "weights" or "kv_cache" again, if they are asleep. Raises DataError where it is missing.

        Training's cached blocks go back to the device first, as vLLM cannot use them.
        """
        if tag not in self._asleep:
            return
        start = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._llm.wake_up(tags=[tag])
        except RuntimeError as error:  # vLLM's allocator has no type of its own for it
            raise DataError(
                f"vLLM cannot take the memory of its {tag} again: {self._free() / GB:.2f} GB are free of the "
                f"{self._freed / GB:.2f} GB that it had in all ({error}). Set rollout.vllm.memory lower, or "
                "engine.offload=true"
            ) from error
        self._asleep.discard(tag)
        self.metrics["time/rollout_wake"] += time.perf_counter() - start

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
