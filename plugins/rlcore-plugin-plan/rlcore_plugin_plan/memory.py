"""The bytes of a role on a device: weights, gradients, moments, activations, generating weights, keys and values.

A trained parameter takes 16 bytes in fp32 (weight, gradient and AdamW's two moments), a frozen one 4. A bf16 role whose
weights are only read by forwards takes 2; its embeddings keep 4 where the model is not sharded. Pipeline stages,
tensor shards and the data-parallel ranks of one copy divide them; tensor shards do not divide embeddings. A working
role also holds

- gathered weights in the forward's precision, and in backward their gradients in fp32;
- activations of the micro-batches under way: s b h (10 + 24 / t) bytes a layer at two bytes an element (Korthikanti et
  al., arXiv 2205.05198, 4.1, without the attention matrix, which fused attention does not keep); with recomputation
  2 s b h, and one layer's activations;
- the logits of one chunk in fp32, with their gradient and their softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.engine import GenerationLayout, Layout
from rlcore_plugin_plan.dataflow import UPDATE, Call
from rlcore_plugin_plan.model_size import ModelSize
from rlcore_plugin_plan.training import is_whole, shard_of, stage_weights
from rlcore_plugin_plan.workload import Workload

TRAINED_BYTES, FROZEN_BYTES = 16, 4
"""Resident bytes of a parameter."""


@dataclass(frozen=True)
class Held:
    """Bytes on the fullest device: `resident` always, `working` in addition while the role computes."""

    resident: float
    working: float


def role_held(
    size: ModelSize, layout: Layout, trains: bool, calls: tuple[Call, ...], work: Workload, *, frozen: bool = False
) -> Held:
    """Return the bytes of a role without its generating weights. `frozen`: only forwards read its weights."""
    shards = shard_of(work, layout)
    weights = stage_weights(size, layout) / layout.tp
    resident = (TRAINED_BYTES if trains else FROZEN_BYTES) * weights / shards
    rounded = frozen and work.dtype_bytes == 2
    if rounded:
        kept = size.embeddings if is_whole(layout, work) else 0.0
        resident = (2 * (weights - kept) + FROZEN_BYTES * kept) / shards
    working = max((_working(size, layout, call, work, rounded=rounded) for call in calls), default=0.0)
    return Held(resident, working)


def _working(size: ModelSize, layout: Layout, call: Call, work: Workload, *, rounded: bool) -> float:
    backward, width = call.method in UPDATE, work.dtype_bytes
    rows = work.rows(call) / call.mini_batches / layout.dp
    count, cut = work.micro_batches(rows, layout.pp)
    tokens = cut * work.lengths.row
    layers = -(-size.layers // layout.pp)
    gathered = 0.0
    sharded = not is_whole(layout, work)
    if sharded or (width == 2 and not rounded):
        whole = stage_weights(size, layout) / layout.tp
        layerwise = size.parameters > work.layerwise_above and layout.pp == 1
        unit = 2 * size.layer / layout.tp + size.embeddings if layerwise else whole
        gathered = min(unit, whole) * (width + (4 if backward and sharded else 0))
    per_layer = tokens * size.hidden * (10 + 24 / layout.tp) * width / 2
    if not backward:
        kept = 2 * per_layer
    else:
        under_way = min(count, layout.pp)
        each = tokens * size.hidden * width if work.recompute else per_layer
        kept = under_way * layers * each + (per_layer if work.recompute else 0.0)
    logits = 0.0
    if size.head == "vocabulary":
        logits = 3 * 4 * min(tokens, work.logits_chunk) * size.vocab
    return gathered + kept + logits


def generating_bytes(size: ModelSize, layout: GenerationLayout, work: Workload, *, apart: bool = False) -> float:
    """Return the bytes of a device's generating weights; 0 if it generates with the trained ones in their precision.

    In bf16 it keeps a rounded copy of the layers and of the head. `apart`: the role is trained on another pool.
    """
    if is_whole(layout.training, work) and work.shares_module and not apart:
        return 2.0 * (size.layers * size.layer + size.vocab * size.hidden) if work.dtype_bytes == 2 else 0.0
    return work.dtype_bytes * (size.layers * size.layer / (layout.pp * layout.tp) + size.embeddings)


def cache_bytes(size: ModelSize, layout: GenerationLayout, work: Workload) -> float:
    """Return a device's bytes for the keys and values of one row: of the longest, in a pool of the mean length."""
    tokens = work.lengths.prompt + (work.lengths.response if work.pooled_cache else work.lengths.most)
    ways = layout.pp * min(layout.tp, size.kv_heads)
    return work.dtype_bytes * size.cache_elements(tokens) / ways
