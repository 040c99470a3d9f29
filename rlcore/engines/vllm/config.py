"""The vllm engine's own config: the keys `rollout.vllm.*`."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config import option


@dataclass(frozen=True)
class VLLMConfig:
    """Limits of vLLM's batch and memory."""

    batch_size: int = option(256, "sequences that a worker decodes at once", min=1)
    kv_cache_mb: int = option(1024, "MiB that a worker takes for keys and values", min=1, was="rollout.kv_cache_mb")
