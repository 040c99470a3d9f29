"""vLLM in processes that already have torch.distributed's default group: the train engine's, in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from rlcore.engine.weights.meter import Group


@contextmanager
def in_engine_order(order: Sequence[int]) -> Iterator[None]:
    """While vLLM starts, have it create its groups from the ranks `order[i]` instead of i.

    vLLM cuts the default group into tensor groups of consecutive ranks; all ranks create all groups. torch sorts the
    ranks of a group, so `order` must ascend within a tensor group. Engines exchange no messages, so groups get no
    message queue, which would take 24 MiB of shared memory each.
    """
    from vllm.distributed import parallel_state

    make = parallel_state.init_model_parallel_group

    def make_of_ours(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        kwargs["use_message_queue_broadcaster"] = False
        return make([[order[rank] for rank in ranks] for ranks in group_ranks], *args, **kwargs)

    parallel_state.init_model_parallel_group = make_of_ours
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = make


def executor(group: Group, order: Sequence[int], device: torch.device) -> type:
    """Return vLLM's executor for an engine in each process of a tensor group (collective within the group).

    vLLM's own executor reads the rank from torchrun's environment variables. This one uses the rank's index in `order`.
    It also names the shared memory in which ranks on a CPU add their results. The name is unique to the group, and
    differs between machines, so that vLLM uses torch's group across machines.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [uuid4().hex]
    dist.broadcast_object_list(name, src=group.ranks[0], group=group.handle)
    place = (f"of-torch:{name[0]}-{gethostname()}", order.index(dist.get_rank()), device.index or 0)
    return type("ExecutorInWorker", (ExecutorWithExternalLauncher,), {"_distributed_args": lambda self: place})


def unlink_shared_memory() -> None:
    """Unlink this rank's shared memory, after all ranks of its tensor group have mapped it.

    vLLM unlinks it when its process exits. A killed process would leave it behind, and Ray kills its workers.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if name := getattr(group.device_communicator.dist_module, "group_name", None):  # set only within one machine
        Path(f"/dev/shm/{name}_{group.rank_in_group}").unlink()


@contextmanager
def keeping_default_group() -> Iterator[None]:
    """While vLLM shuts down, have it destroy the groups that it created, but not the process's default group."""
    from vllm.distributed import parallel_state

    destroy = parallel_state.destroy_distributed_environment

    def destroy_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    parallel_state.destroy_distributed_environment = destroy_world
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = destroy
