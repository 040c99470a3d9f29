"""The share of a device's memory that vLLM takes beside training, and whether it gives it back while training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.errors import ConfigError

CPU_BYTES = 1 << 30
AWAKE_SHARE = 0.3
"""Of the remaining memory, while training keeps the rest for its activations."""
ALONE_SHARE = 0.85
"""Of the remaining memory, where no activations of training are in it at the same time; the rest is for vLLM's own."""


@dataclass(frozen=True)
class Needs:
    """Bytes on one device. `row`: keys and values of the longest row. `weights`: vLLM's.

    `training`: still to come in this process; `kept`: the part of it that stays while vLLM samples.
    """

    row: int
    rows: int
    weights: int
    training: int
    kept: int
    beside_training: bool

    @classmethod
    def of(
        cls,
        hf_config: Any,
        shapes: Shapes,
        dtype: torch.dtype,
        *,
        rows: int,
        row_tokens: int,
        ranks: int,
        beside_training: bool,
        training: int,
        kept: int,
    ) -> Needs:
        """Read a model's needs for `rows` rows of `row_tokens` tokens (0: of the most that the model takes).

        `ranks`: tensor-parallel ranks, which divide vLLM's weights and heads. The others: see Needs.
        """
        text = hf_config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token = text.num_hidden_layers * 2 * max(1, heads // ranks) * size * dtype.itemsize
        return cls(
            row=token * (row_tokens or text.max_position_embeddings),
            rows=rows,
            weights=sum(map(prod, shapes.values())) * dtype.itemsize // ranks,
            training=training,
            kept=kept,
            beside_training=beside_training,
        )


@dataclass(frozen=True)
class MemoryPlan:
    """`cache`: bytes for keys and values. `sleeps`: vLLM frees them, and its weights, while the device trains."""

    cache: int
    sleeps: bool


def plan(config: VLLMConfig, needs: Needs, free: int | None) -> MemoryPlan:
    """Return vLLM's memory on a device with `free` bytes after the train engine has loaded; None: a CPU.

    The rest is `free` without vLLM's weights and without what training takes later; for a vLLM that sleeps, only what
    training keeps while rows are sampled. `auto` takes room for `rows` of the longest rows; while training keeps its
    activations, at most AWAKE_SHARE of the rest, otherwise ALONE_SHARE of it. vLLM sleeps by `auto` where AWAKE_SHARE
    is too little. Raises ConfigError where not one row fits.
    """
    if config.sleep == "on" and not needs.beside_training:
        raise ConfigError(
            "rollout.vllm.sleep=on frees memory for training on the same device, but no role trains in the process of "
            "this vLLM; set rollout.vllm.sleep=auto"
        )
    asked = None if config.memory == "auto" else config.memory << 20
    if free is None:
        return MemoryPlan(asked or CPU_BYTES, sleeps=config.sleep == "on")
    wanted = asked or needs.row * needs.rows
    sleeps, share, to_come = _beside(config, needs, free, wanted)
    rest = free - needs.weights - to_come
    cache = asked or min(wanted, int(share * rest))
    if asked is None and cache < needs.row:
        raise ConfigError(
            f"rollout.vllm.memory=auto: of {free / 1e9:.2f} GB free on the GPU, vLLM's weights take "
            f"{needs.weights / 1e9:.2f} GB and training will take {to_come / 1e9:.2f} GB; {share:.0%} of the "
            f"rest does not hold the keys and values of one row of {needs.row / 1e9:.2f} GB. Set rollout.vllm.memory "
            "in MiB, rollout.vllm.sleep=on, a shorter rollout.response_len, or a pool of its own for rollout"
        )
    return MemoryPlan(cache, sleeps)


def _beside(config: VLLMConfig, needs: Needs, free: int, wanted: int) -> tuple[bool, float, int]:
    """Return whether vLLM sleeps, the share of the rest that `auto` may take, and training's bytes outside the rest."""
    rest = free - needs.weights - needs.training
    if not needs.beside_training:
        return False, ALONE_SHARE, needs.training
    if config.sleep == "off" or (config.sleep == "auto" and wanted <= AWAKE_SHARE * rest):
        return False, AWAKE_SHARE, needs.training
    # vLLM loads its weights before training's part moves out, so both have to fit at once.
    return True, ALONE_SHARE, needs.kept if rest >= 0 else needs.training


def measure(needs: Needs, device: torch.device, share: float, group: Group | None) -> tuple[Needs, int | None]:
    """Return the needs, and the bytes that this process can still take on a GPU; None on a CPU.

    `share`: the process's share of the GPU, and so of what is free there. Of a tensor group, training's largest needs
    and the least free bytes: its ranks need caches of the same size, as they have to schedule alike.
    """
    if device.type != "cuda":
        return needs, None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(share * (torch.cuda.mem_get_info(device)[0] + unused))
    if group is None:
        return needs, free
    found: list[tuple[int, int, int]] = [(0, 0, 0)] * len(group.ranks)
    dist.all_gather_object(found, (free, needs.training, needs.kept), group=group.handle)
    frees, training, kept = zip(*found, strict=True)
    return replace(needs, training=max(training), kept=max(kept)), min(frees)
