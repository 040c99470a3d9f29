"""The seconds of a forward without gradient (log-probs, values, scores), and of moving weights between roles.

The cost model of a forward is that of `training`: a third of an update's operations, two all-reduces a layer with
tensor shards, one gather of sharded weights, and the pipeline's bubble.
"""

from __future__ import annotations

from rlcore.engine import Layout
from rlcore_plugin_plan.dataflow import Call
from rlcore_plugin_plan.model_size import ModelSize
from rlcore_plugin_plan.profile import Profile
from rlcore_plugin_plan.training import pass_seconds
from rlcore_plugin_plan.workload import Workload


def forward_seconds(size: ModelSize, layout: Layout, call: Call, work: Workload, profile: Profile) -> float:
    """Return the seconds of a forward over a call's rows."""
    count, rows = work.micro_batches(work.rows(call) / layout.dp, layout.pp)
    return pass_seconds(size, layout, call, rows, count, work, profile, backward=False)


def weights_seconds(size: ModelSize, layout: Layout, profile: Profile, *, apart: bool) -> float:
    """Return the seconds of taking over another role's weights, in fp32.

    In one process each rank copies its shard. `apart`: the weights come from another pool, and every rank reads the
    full model at the rate of the network.
    """
    if not apart:
        return 3 * 4 * size.parameters / layout.world_size / profile.memory_rate
    rate = min(profile.link, profile.network / min(profile.per_machine, layout.world_size))
    return 4 * size.parameters / rate
