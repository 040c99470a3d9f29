"""The vllm engine's own config: the keys `rollout.vllm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.config import option


@dataclass(frozen=True)
class VLLMConfig:
    """Limits of vLLM's batch and memory."""

    batch_size: int = option(256, "sequences that a worker decodes at once", min=1)
    memory: Literal["auto"] | int = option(
        "auto",
        "MiB that a worker takes for keys and values. `auto`: from what training leaves on the GPU, 1024 on a CPU "
        "(docs/rollout.md)",
        min=1,
        was="rollout.vllm.kv_cache_mb",
    )
    sleep: Literal["auto", "on", "off"] = option(
        "auto",
        "free the weights, keys and values while the GPU trains; auto: where both needs do not fit together",
    )
