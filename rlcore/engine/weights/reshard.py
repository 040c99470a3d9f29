"""Makes generating shards of training shards, by exchanges inside micro-DP groups (HybridFlow, arXiv 2409.19256, 5.3).

One flat buffer holds this rank's generating shards. A rank's generating shard contains its training shard. So the
training shard is copied to its place in the buffer, and the exchange writes the other parts next to it, without a
staging copy.

In the buffer each parameter is a run of elements with its cut dimension first, so every shard is one run too. A
row-parallel weight is therefore stored transposed, and engines get a view of it with swapped strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rlcore.engine.parallel.layout import ShardSpec
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import Group, Meter, Piece, ProcessGroups
from rlcore.errors import ConfigError, DataError

BUCKET_BYTES = 64 * 2**20


class Reshard:
    """Makes this rank's generating shards from the training shards of all ranks. Creating one is collective.

    With t tensor shards and p stages in training, t_g and p_g in generation, and M bytes of divided parameters, each
    rank receives (t p - t_g p_g) / (t_g p_g t p) M, and its buffer has M / (t_g p_g) bytes (Table 2).

    `cuts` are the ShardSpecs of the training layout by Hugging Face name, in the same order on all ranks.
    `bucket_bytes` bounds the bytes under way while earlier parameters are used. Raises ConfigError for a tensor that
    the layout cannot divide evenly.
    """

    def __init__(
        self,
        layout: GenerationLayout,
        cuts: Mapping[str, ShardSpec],
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.layout, self.rank = layout, groups.rank
        self.coordinates = layout.training.coordinates(self.rank)
        self.dtype, self.device = dtype, device or torch.device("cpu")
        self.bucket_bytes = bucket_bytes
        self.meter = Meter()
        for name, cut in cuts.items():
            if cut.dim is not None and cut.shape[cut.dim] % layout.training.tp:
                raise ConfigError(
                    f"{name} has shape {list(cut.shape)}: engine.tp={layout.training.tp} does not divide its dimension "
                    f"{cut.dim} evenly, as resharding needs"
                )
        self._join(groups)
        self.shard_specs = {name: cut for name, cut in cuts.items() if self._holds(cut)}
        # Matrices before vectors: no bias then separates neighbouring weights, which engines fuse into one view.
        order = sorted(self.shard_specs, key=lambda name: -len(self.shard_specs[name].shape))
        ends = list(accumulate((self._numel(self.shard_specs[name]) for name in order), initial=0))
        self._runs = dict(zip(order, pairwise(ends), strict=True))
        self._elements = ends[-1]
        self._buffer: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The flat buffer [elements] of this rank's generating shards, allocated at first use."""
        if self._buffer is None:
            self._buffer = self.meter.allocate(self._elements, self.dtype, self.device)
        return self._buffer

    def release(self) -> None:
        """Release the buffer. Shards yielded earlier stay valid, and keep its memory alive while one of them exists."""
        if self._buffer is not None:
            self.meter.free(self._buffer)
            self._buffer = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's generating shards by name."""
        return {name: tuple(self._shard(cut, self._flat(name)).shape) for name, cut in self.shard_specs.items()}

    def gather(self, shards: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's generating shards by name, the first ones while later ones are under way.

        `shards` are this rank's training shards in any order; each is read once, before the next. The yielded tensors
        are views of the buffer and valid until the next call. Raises DataError, before anything is sent, for shards
        that are not those of the layout.
        """
        # All copies before the first exchange, which sends from the buffer; errors come before anything is sent.
        self._put(shards)
        under_way: deque[tuple[str, list[Any]]] = deque()
        waiting = 0
        for name, cut in self.shard_specs.items():
            flat = self._flat(name)
            under_way.append((name, self.meter.exchange(flat, self._pieces(cut), self._group(cut), self.rank)))
            waiting += flat.nbytes
            # Hand out the oldest only when the bucket is full: the engine's copy then overlaps the later exchanges.
            while waiting > self.bucket_bytes and len(under_way) > 1:
                waiting -= self._flat(under_way[0][0]).nbytes
                yield self._finished(*under_way.popleft())
        while under_way:
            yield self._finished(*under_way.popleft())

    def redundant_bytes(self, shards: Mapping[str, Tensor]) -> int:
        """Return the bytes of those `shards` whose memory lies outside the buffer, so that the buffer repeats them."""
        start, stop = self.buffer.data_ptr(), self.buffer.data_ptr() + self.buffer.nbytes
        beside = [shard for shard in shards.values() if not start <= shard.data_ptr() < stop]
        return sum(shard.numel() * self.buffer.itemsize for shard in beside)

    def _finished(self, name: str, works: list[Any]) -> tuple[str, Tensor]:
        for work in works:
            work.wait()
        return name, self._shard(self.shard_specs[name], self._flat(name))

    def _put(self, shards: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's training shards to their places in the buffer, unless they are there already."""
        slots = {name: self._slot(cut, self._flat(name)) for name, cut in self.shard_specs.items() if self._gives(cut)}
        for name, shard in shards:
            slot = slots.pop(name, None)
            if slot is None or slot.shape != shard.shape:
                wanted = "none" if slot is None else list(slot.shape)
                raise DataError(
                    f"rank {self.rank}: shard of {name} has shape {list(shard.shape)}; the layout has {wanted}"
                )
            self.meter.copy(shard, slot)
        if slots:
            raise DataError(f"rank {self.rank}: shards are missing of {', '.join(sorted(slots)[:5])}")

    def _flat(self, name: str) -> Tensor:
        start, stop = self._runs[name]
        return self.buffer[start:stop]

    def _gives(self, cut: ShardSpec) -> bool:
        """Whether this rank has a training shard of the parameter."""
        return self.coordinates.pp in cut.stages

    def _cut_first(self, cut: ShardSpec, flat: Tensor) -> Tensor:
        """Return a run of elements, stored with the cut dimension first, as a shard of the parameter."""
        if cut.dim is None:
            return flat.view(cut.shape)
        others = [size for dim, size in enumerate(cut.shape) if dim != cut.dim]
        return flat.view(-1, *others).movedim(0, cut.dim)

    def _join(self, groups: ProcessGroups) -> None:
        """Create the process groups (collective). Called first."""
        self._stages = self.layout.stages(self.rank)
        self._shards = self.layout.tensor_shards(self.rank)
        micro_dp = self.layout.groups("micro_dp")
        self._peers = groups.own(micro_dp)
        self._same_shard = groups.own(by_tensor_shard(self.layout, micro_dp))

    def _holds(self, cut: ShardSpec) -> bool:
        """Whether the parameter is in this rank's buffer."""
        return any(stage in cut.stages for stage in self._stages)

    def _numel(self, cut: ShardSpec) -> int:
        """Return the number of the parameter's elements in the buffer."""
        # `_shards` are the training shards inside this rank's generating shard.
        whole = torch.Size(cut.shape).numel()
        return whole if cut.dim is None else whole * len(self._shards) // self.layout.training.tp

    def _group(self, cut: ShardSpec) -> Group:
        """Return the ranks that exchange the parameter."""
        # All ranks of a stage hold an undivided parameter, so only ranks of other stages receive it.
        return self._same_shard if cut.dim is None else self._peers

    def _pieces(self, cut: ShardSpec) -> list[Piece]:
        """Return the part of the run that each rank of the group sends."""
        if cut.dim is None and all(stage in cut.stages for stage in self._stages):
            return []
        # Tied embeddings are on two stages with equal weights; the first stage sends them.
        stage = next(stage for stage in self._stages if stage in cut.stages)
        there = [rank for rank in self._group(cut).ranks if self.layout.training.coordinates(rank).pp == stage]
        size = self._numel(cut) // len(there)
        return [Piece(rank, index * size, (index + 1) * size) for index, rank in enumerate(there)]

    def _slot(self, cut: ShardSpec, flat: Tensor) -> Tensor:
        """Return the place of this rank's training shard in the parameter's run, in the shard's shape."""
        if cut.dim is None:
            return self._cut_first(cut, flat)
        size = flat.numel() // len(self._shards)
        start = (self.coordinates.tp - self._shards.start) * size
        return self._cut_first(cut, flat[start : start + size])

    def _shard(self, cut: ShardSpec, flat: Tensor) -> Tensor:
        """Return this rank's generating shard from the parameter's run."""
        return self._cut_first(cut, flat)


def by_tensor_shard(layout: GenerationLayout, groups: list[list[int]]) -> list[list[int]]:
    """Split groups into those of the ranks with the same training tensor shard."""
    parts: list[list[int]] = []
    for group in groups:
        by_tp: dict[int, list[int]] = {}
        for rank in group:
            by_tp.setdefault(layout.training.coordinates(rank).tp, []).append(rank)
        parts += by_tp.values()
    return parts
