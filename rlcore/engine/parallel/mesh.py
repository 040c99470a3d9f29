"""The ranks of a train engine as a mesh with named axes, and the collectives along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.engine.collectives import Ranks
from rlcore.engine.parallel.layout import Coordinates, Layout

T = TypeVar("T")


class TrainMesh:
    """This rank's coordinates in a layout, and the process groups along its axes.

    Axes, outermost first: `replicate` and `shard`, which together are dp (`shard` ranks share one copy of the weights,
    0: all of dp), `pp`, `tp`. Axes of size 1 are left out, except `shard`. With one rank there is no mesh.
    """

    def __init__(self, ranks: Ranks, layout: Layout, shard: int = 0) -> None:
        self.ranks, self.layout = ranks, layout
        self.coordinates: Coordinates = layout.coordinates(ranks.rank)
        self.shards = shard or layout.dp
        self.copies = layout.dp // self.shards
        self.copy, self.shard = divmod(self.coordinates.dp, self.shards)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the full model; the copies then only average their gradients."""
        return self.layout.pp == self.layout.tp == self.shards == 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is on the first stage."""
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last stage."""
        return self.coordinates.pp == self.layout.pp - 1

    @cached_property
    def devices(self) -> Any:
        """The torch DeviceMesh. The first access is a collective of all ranks, as it creates process groups."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {"replicate": self.copies, "shard": self.shards, "pp": self.layout.pp, "tp": self.layout.tp}
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh(self.ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    @property
    def data(self) -> Any:
        """The DeviceMesh that FSDP2 shards over: `shard`, or `replicate` x `shard`."""
        return self.devices["replicate", "shard"] if self.copies > 1 else self.devices["shard"]

    def group(self, axis: str) -> Any:
        """Return the process group of the ranks that differ from this one only along `axis`."""
        return self.devices[axis].get_group()

    def one_per_dp_rank(self, everyone: Sequence[T]) -> list[T]:
        """Keep one value for each data-parallel rank: that of tensor rank 0 on the last pipeline stage."""
        last = self.layout.pp - 1
        ranks = [self.layout.rank(Coordinates(pp=last, tp=0, dp=dp)) for dp in range(self.layout.dp)]
        return [everyone[rank] for rank in ranks]

    def broadcast_from_stage(self, stage: int, tensor: Tensor) -> Tensor:
        """Broadcast a tensor from the rank on `stage` to all stages; the others pass a tensor of its shape to fill."""
        if self.layout.pp > 1:
            source = self.layout.rank(Coordinates(pp=stage, tp=self.coordinates.tp, dp=self.coordinates.dp))
            dist.broadcast(tensor, src=source, group=self.group("pp"))
        return tensor

    def join_data_shards(self, local: Tensor, rows: int) -> Tensor:
        """Gather a tensor of `rows` rows that FSDP2 sharded: equal shards, except on the last ranks."""
        if self.shards == 1:
            return local
        # all_gather needs equal sizes, and FSDP2 gives the last ranks fewer rows.
        size = -(-rows // self.shards)
        padded = local.new_zeros(size, *local.shape[1:])
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in range(self.shards)]
        dist.all_gather(parts, padded, group=self.group("shard"))
        return torch.cat(parts)[:rows]

    def join_tensor_shards(self, local: Tensor, dim: int | None) -> Tensor:
        """Gather a tensor that is sharded along `dim` over tp; with `dim` None, return it unchanged."""
        if dim is None or self.layout.tp == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(self.layout.tp)]
        dist.all_gather(parts, local.contiguous(), group=self.group("tp"))
        return torch.cat(parts, dim)

    def average_copies(self, tensor: Tensor) -> None:
        """Average a tensor, in place, over the copies of the model."""
        # A sum and a division, as gloo has no average.
        dist.all_reduce(tensor, group=self.group("replicate"))
        tensor.div_(self.copies)

    def reduce_tied_embeddings(self, tensor: Tensor) -> None:
        """Add up, in place, the gradients that the first and the last stage have of tied embeddings."""
        if self.layout.pp == 1 or not (self.is_first_stage or self.is_last_stage):
            return
        other = self.layout.rank(
            Coordinates(
                pp=self.layout.pp - 1 if self.is_first_stage else 0, tp=self.coordinates.tp, dp=self.coordinates.dp
            )
        )
        theirs = torch.empty_like(tensor)
        group = self.group("pp")
        # Both directions in one batch: two ranks that both send first would wait for each other.
        ops = [dist.P2POp(dist.isend, tensor, other, group), dist.P2POp(dist.irecv, theirs, other, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        tensor.add_(theirs)
