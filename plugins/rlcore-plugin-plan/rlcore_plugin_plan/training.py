"""The seconds of an update on pipeline stages x tensor shards x data-parallel ranks.

A stage's time for one micro-batch of n tokens (Workload.computed) has three parts. Its matrix products and the reads of
its weights overlap: the larger counts. The host's time counts only where it is longer, as a GPU runs beside its host.
The tensor shards' messages come on top:

    compute  = k (F_layer(n) of its layers + its head's) / t / (peak * training)      k = 3, with recomputation 4
    memory   = k * bytes of its weights / t / (bandwidth * share)
    host     = 2 * layers * layer_seconds, forward and backward
    tensor   = 4 all-reduces of n * hidden a layer, with recomputation 6       (Megatron-LM, arXiv 2104.04473, 3.2)

A backward takes twice the operations of a forward (Kaplan et al., arXiv 2001.08361, 2.1). With m micro-batches a
pipeline of p stages takes m + p - 1 times the slowest stage's time (1F1B's bubble, arXiv 2104.04473, 2.2.1), plus the
time to send hidden states and their gradients from stage to stage. Sharded weights are gathered before forward and
backward, and their gradients reduced: layer by layer for large models, once for small ones and for stages (FSDP, arXiv
2304.11277, 3.2). Compute hides a share of this. An optimizer step reads weights, gradients and both moments, and writes
all but the gradients: 28 bytes a parameter in fp32.
"""

from __future__ import annotations

from rlcore.engine import Layout
from rlcore_plugin_plan.dataflow import Call
from rlcore_plugin_plan.model_size import ModelSize
from rlcore_plugin_plan.profile import Profile
from rlcore_plugin_plan.workload import Workload

OPTIMIZER_BYTES = 28
"""Bytes that AdamW moves for a parameter in fp32: weight (4) and moments (8) read and written, gradient (4) read."""
SYNC_MESSAGES = 6
"""Small collectives of an optimizer step: numbers of micro-batches, counts, reports, and the gradient's norm."""


def update_seconds(size: ModelSize, layout: Layout, call: Call, work: Workload, profile: Profile) -> float:
    """Return the seconds of an update: all its epochs and mini-batches."""
    rows = work.rows(call) / call.mini_batches / layout.dp
    count, cut = work.micro_batches(rows, layout.pp)
    passes = pass_seconds(size, layout, call, cut, count, work, profile, backward=True)
    owners = layout.pp * layout.tp * shard_of(work, layout)
    step = OPTIMIZER_BYTES * size.parameters / owners / profile.memory_rate + profile.optimizer_seconds
    everyone = layout.world_size
    step += SYNC_MESSAGES * profile.gather_seconds(1e3, everyone, 1)
    copies = layout.dp // shard_of(work, layout)
    if copies > 1:  # each copy has the gradient of its own rows, and an all-reduce adds them up
        held = 4 * stage_weights(size, layout) / layout.tp / shard_of(work, layout)
        step += profile.reduce_seconds(held, copies, layout.pp * layout.tp * shard_of(work, layout))
    return call.epochs * call.mini_batches * (passes + step)


def shard_of(work: Workload, layout: Layout) -> int:
    """Return the number of data-parallel ranks that share one copy of the weights."""
    return work.shard or layout.dp


def is_whole(layout: Layout, work: Workload) -> bool:
    """Whether each device has the whole model, so that nothing is gathered and generation uses the trained weights."""
    return layout.pp == layout.tp == shard_of(work, layout) == 1


def stage_weights(size: ModelSize, layout: Layout) -> float:
    """Return the parameters of the largest stage; embeddings count `tp` times, as each tensor shard has a full copy."""
    layers = -(-size.layers // layout.pp) * size.layer
    ends = size.embeddings if layout.pp == 1 else size.vocab * size.hidden
    return layers + ends * layout.tp


def pass_seconds(
    size: ModelSize,
    layout: Layout,
    call: Call,
    rows: float,
    count: int,
    work: Workload,
    profile: Profile,
    *,
    backward: bool,
) -> float:
    """Return the seconds of `count` micro-batches of `rows` rows of a call: forward, and backward if asked."""
    p, t = layout.pp, layout.tp
    tokens = work.computed(rows, call, cpu=profile.cpu)
    # A shared prompt is computed once, but each of its rows attends to it.
    context = work.lengths.context * rows * work.lengths.row / tokens
    answers = rows * (work.lengths.response if size.head == "vocabulary" else 1)
    times = (4.0 if work.recompute else 3.0) if backward else 1.0
    share = profile.training if backward else profile.forward
    rate = profile.flops(work.dtype_bytes) * share
    layers = -(-size.layers // p)
    of_layers = layers * size.layer_flops(tokens, context) / t
    with_head = (size.layers // p) * size.layer_flops(tokens, context) / t + size.head_flops(answers)
    compute = times * max(of_layers, with_head) / rate
    memory = times * work.dtype_bytes * stage_weights(size, layout) / t / profile.memory_rate
    busy = profile.together(max(compute, memory), (2.0 if backward else 1.0) * layers * profile.layer_seconds)
    if t > 1:
        reductions = ((6 if work.recompute else 4) if backward else 2) * layers
        busy += reductions * profile.reduce_seconds(tokens * size.hidden * work.dtype_bytes, t, 1)
    if p > 1:
        sent = tokens * size.hidden * work.dtype_bytes
        busy += (2 if backward else 1) * profile.send_seconds(sent, t) + profile.pipeline_seconds
    whole = (count + p - 1) * busy
    moved = _sharding_seconds(size, layout, count, work, profile, backward=backward)
    return whole + max(0.0, moved - profile.overlap * whole)


def _sharding_seconds(
    size: ModelSize, layout: Layout, count: int, work: Workload, profile: Profile, *, backward: bool
) -> float:
    """Return the seconds of gathering sharded weights, and of reducing and scattering their gradients in fp32."""
    shards, stride = shard_of(work, layout), layout.pp * layout.tp
    if layout.world_size == 1 or shards == 1:
        return 0.0
    held = stage_weights(size, layout) / layout.tp
    gather = profile.gather_seconds(work.dtype_bytes * held, shards, stride)
    scatter = profile.gather_seconds(4 * held, shards, stride)
    if layout.pp > 1:
        return gather + (scatter if backward else 0.0)
    layerwise = size.parameters > work.layerwise_above
    if not backward:
        return count * gather if layerwise else gather
    return count * ((2 * gather if layerwise else gather) + scatter)
