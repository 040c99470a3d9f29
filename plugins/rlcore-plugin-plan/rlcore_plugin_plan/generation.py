"""The seconds of sampling on replicas of p_g stages x t_g tensor shards, and of the transition from training shards.

A replica with B rows decodes them in rounds of at most C rows, the number whose keys and values fit into its memory. A
decoding step of b live rows takes time on the device and on the host; a GPU and its host work at the same time:

    device   max( 2 P b / (p_g t_g) / (peak * decoding),
                  (bytes of weights + keys and values) / (p_g t_g) / (bandwidth * share) )
             + 2 all-reduces a layer of b * hidden
    host     layers decode_layer_seconds + decode_step_seconds + b decode_row_seconds

since each step reads all weights and all keys and values once (Pope et al., arXiv 2211.05102, 2; DistServe, arXiv
2401.09670, 3.1, on separating prefill from decoding). Prefill is a forward over the distinct prompts. With p_g stages a
token passes all of them, and rounds of rows fill them. Decoding ends with the longest response of all replicas; the
number of live rows falls as shorter responses end. With continuous batching the number of rounds need not be whole.

The transition: inside micro-DP groups each rank gathers (t p - t_g p_g) / (t_g p_g t p) M, M bytes being the model's
(HybridFlow, arXiv 2409.19256, Table 2), after the shards along dp are gathered, (d - 1) / (t p d) M.
"""

from __future__ import annotations

import math

from rlcore.engine import GenerationLayout, Layout
from rlcore_plugin_plan.dataflow import Call
from rlcore_plugin_plan.model_size import ModelSize
from rlcore_plugin_plan.profile import Profile
from rlcore_plugin_plan.training import is_whole, shard_of
from rlcore_plugin_plan.workload import Workload

POINTS = 4
"""Sample points of a run of decoding steps; the midpoint rule, as a step's time is almost linear in its context."""


def generate_seconds(
    size: ModelSize, layout: GenerationLayout, call: Call, work: Workload, slots: int, profile: Profile
) -> float:
    """Return the seconds of sampling a call's rows; each replica decodes at most `slots` rows at a time."""
    replicas = layout.replicas
    rows = math.ceil(work.rows(call) / replicas)
    most = max(1, min(rows, slots))
    rounds = rows / most if work.continuous else math.ceil(rows / most)
    at_once = rows / rounds
    prompts = call.prompts * work.prompts / replicas
    ways = layout.pp * layout.tp
    prefill = size.layers * size.layer_flops(prompts * work.lengths.prompt, work.lengths.prompt / 2) / ways
    seconds = max(prefill, 0.0) / (profile.flops(work.dtype_bytes) * profile.forward)
    seconds += math.ceil(rounds) * size.layers * profile.layer_seconds
    decoding = 0.0
    for start, end, share in work.lengths.runs:
        start, end = round(start * call.share), round(end * call.share)
        # Probability that some replica still has a live row; with few rows this run of steps may have none.
        alive = 1 - (1 - share) ** (at_once * replicas)
        live = max(1.0, at_once * share)
        points = [start + (end - start) * (point + 0.5) / POINTS for point in range(POINTS)]
        steps = [step_seconds(size, layout, live, work.lengths.prompt + at, work, profile) for at in points]
        decoding += alive * (end - start) * sum(steps) / POINTS
    return seconds + rounds * decoding


def step_seconds(
    size: ModelSize, layout: GenerationLayout, rows: float, context: float, work: Workload, profile: Profile
) -> float:
    """Return the seconds of one decoding step of `rows` rows with `context` tokens each."""
    ways = layout.pp * layout.tp
    flops = size.layers * size.layer_flops(rows, context) + size.head_flops(rows)
    compute = flops / ways / (profile.flops(work.dtype_bytes) * profile.decoding)
    nbytes = work.dtype_bytes * (size.parameters + size.cache_elements(rows * context))
    busy = max(compute, nbytes / ways / profile.memory_rate)
    if layout.tp > 1:
        stride = layout.training.tp // layout.tp
        message = rows * size.hidden * work.dtype_bytes
        busy += 2 * size.layers / layout.pp * profile.reduce_seconds(message, layout.tp, stride)
    if layout.pp > 1:
        busy += (layout.pp - 1) * profile.send_seconds(rows * size.hidden * work.dtype_bytes, layout.training.tp)
    host = size.layers / layout.pp * profile.decode_layer_seconds
    host += profile.decode_step_seconds + rows * profile.decode_row_seconds
    return profile.together(busy, host)


def transition_seconds(size: ModelSize, layout: GenerationLayout, work: Workload, profile: Profile) -> float:
    """Return the seconds of the transition from training shards to generating shards."""
    training = layout.training
    if is_whole(training, work) and work.shares_module:
        return 0.0
    nbytes = work.dtype_bytes * size.parameters
    held, wanted = training.pp * training.tp, layout.pp * layout.tp
    along_dp = profile.gather_seconds(nbytes / held, shard_of(work, training), held)
    inside = profile.gather_seconds(nbytes / wanted, held // wanted, 1)
    return along_dp + inside + 2 * nbytes / wanted / profile.memory_rate + profile.transition_seconds


def send_seconds(size: ModelSize, training: Layout, copies: int, work: Workload, profile: Profile) -> float:
    """Return the seconds of sending the weights to another pool, where every rank reads the full model."""
    nbytes = work.dtype_bytes * size.parameters
    gathered = profile.gather_seconds(nbytes, training.world_size, 1)
    return gathered + nbytes / min(profile.link, profile.network / min(profile.per_machine, copies))
