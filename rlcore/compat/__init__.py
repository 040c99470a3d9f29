"""The names of verl's documentation: a program written on verl's single controller imports them from here.

Some are rlcore's own names, repeated so that one import line suffices; the rest exist for such programs only.
docs/coming_from_verl.md lists the differences from verl.
"""

from rlcore.compat.batches import pad_dataproto_to_divisor, unpad_dataproto
from rlcore.compat.dataproto import DataProto
from rlcore.compat.groups import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    split_resource_pool,
)
from rlcore.protocol import DataProtoItem
from rlcore.workers import Dispatch, Execute, Worker, WorkerGroup, register
from rlcore.workers.ray.pool import RayResourcePool

__all__ = [
    "DataProto",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "pad_dataproto_to_divisor",
    "register",
    "split_resource_pool",
    "unpad_dataproto",
]
