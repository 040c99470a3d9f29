"""Three ways from training shards to generating shards: HybridFlow's, and the two that it is compared with (Table 2).

`hybridflow` gathers inside micro-DP groups. One buffer holds the generating shard and, as a part of it, the training
shard; what comes in lands where it stays. `model_parallel` (the paper's HybridFlow-V) gathers the whole model inside
each training copy, `all_ranks` (DeepSpeed-Chat) from flat shards over all ranks; both beside the training shard.

In a buffer each parameter is a run of elements with its cut dimension first, so that every shard is one run too: a
row-wise parallel weight lies there transposed, and what an engine gets is a view of it with swapped strides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rlcore.engine.parallel.layout import Cut
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import Group, Meter, Piece, ProcessGroups
from rlcore.errors import ConfigError, DataError

BUCKET_BYTES = 64 * 2**20


class Reshard(ABC):
    """Makes this rank's generating shards from the training shards of all ranks. Making one is collective.

    `cuts` are those of the training layout by Hugging Face name, in the same order on all ranks.
    `bucket_bytes`: the most that is on its way while what came before is used. Raises ConfigError for a tensor that the
    layout cannot divide evenly.
    """

    def __init__(
        self,
        layout: GenerationLayout,
        cuts: Mapping[str, Cut],
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.layout, self.rank = layout, groups.rank
        self.place = layout.training.place(self.rank)
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
        self.cuts = {name: cut for name, cut in cuts.items() if self._holds(cut)}
        # Matrices before vectors, so that no bias parts the weights that engines fuse.
        order = sorted(self.cuts, key=lambda name: -len(self.cuts[name].shape))
        ends = list(accumulate((self._numel(self.cuts[name]) for name in order), initial=0))
        self._runs = dict(zip(order, pairwise(ends), strict=True))
        self._elements = ends[-1]
        self._buffer: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The flat buffer [elements] of all that this rank holds; made when it is first needed."""
        if self._buffer is None:
            self._buffer = self.meter.allocate(self._elements, self.dtype, self.device)
        return self._buffer

    def release(self) -> None:
        """Let the buffer go. Shards given out stay valid, and keep its memory, as long as someone holds one."""
        if self._buffer is not None:
            self.meter.free(self._buffer)
            self._buffer = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's generating shards by name."""
        return {name: tuple(self._shard(cut, self._flat(name)).shape) for name, cut in self.cuts.items()}

    def gather(self, shards: Iterable[tuple[str, Tensor]], *, row_major: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's generating shards by name, those that came first while later ones are on their way.

        `shards`: this rank's training shards in any order, read one at a time and no longer needed then. What is
        yielded is valid until the next call. `row_major`: a shard that lies transposed is yielded as a copy, valid
        until the next is asked for. Raises DataError, before anything is sent, for shards that are not those of the
        layout.
        """
        self._put(shards)
        on_the_way: deque[tuple[str, list[Any]]] = deque()
        waiting = 0
        for name, cut in self.cuts.items():
            flat = self._flat(name)
            on_the_way.append((name, self.meter.exchange(flat, self._pieces(cut), self._group(cut), self.rank)))
            waiting += flat.nbytes
            while waiting > self.bucket_bytes and len(on_the_way) > 1:
                waiting -= self._flat(on_the_way[0][0]).nbytes
                yield from self._finished(*on_the_way.popleft(), row_major)
        while on_the_way:
            yield from self._finished(*on_the_way.popleft(), row_major)

    def redundant_bytes(self, shards: Mapping[str, Tensor]) -> int:
        """Return the bytes of the buffer that repeat `shards`: those whose memory does not lie in it."""
        start, stop = self.buffer.data_ptr(), self.buffer.data_ptr() + self.buffer.nbytes
        beside = [shard for shard in shards.values() if not start <= shard.data_ptr() < stop]
        return sum(shard.numel() * self.buffer.itemsize for shard in beside)

    def _finished(self, name: str, works: list[Any], row_major: bool) -> Iterator[tuple[str, Tensor]]:
        for work in works:
            work.wait()
        shard = self._shard(self.cuts[name], self._flat(name))
        if not row_major or shard.is_contiguous():
            yield name, shard
            return
        copy = self.meter.allocate(shard.numel(), self.dtype, self.device)
        self.meter.copy(shard, copy.view(shard.shape))
        yield name, copy.view(shard.shape)
        self.meter.free(copy)

    def _put(self, shards: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's training shards to their places in the buffer, unless they live there."""
        slots = {name: self._slot(cut, self._flat(name)) for name, cut in self.cuts.items() if self._gives(cut)}
        for name, shard in shards:
            slot = slots.pop(name, None)
            if slot is None or slot.shape != shard.shape:
                wanted = "none" if slot is None else list(slot.shape)
                raise DataError(f"rank {self.rank} gave a shard of {name} {list(shard.shape)}; the layout has {wanted}")
            self.meter.copy(shard, slot)
        if slots:
            raise DataError(f"rank {self.rank} did not give its shards of {', '.join(sorted(slots)[:5])}")

    def _flat(self, name: str) -> Tensor:
        start, stop = self._runs[name]
        return self.buffer[start:stop]

    def _gives(self, cut: Cut) -> bool:
        """Whether this rank has a training shard of the parameter."""
        return self.place.pp in cut.stages

    def _cut_first(self, cut: Cut, flat: Tensor) -> Tensor:
        """Return a run of elements, which lie with the cut dimension first, as a part of the parameter."""
        if cut.dim is None:
            return flat.view(cut.shape)
        others = [size for dim, size in enumerate(cut.shape) if dim != cut.dim]
        return flat.view(-1, *others).movedim(0, cut.dim)

    @abstractmethod
    def _join(self, groups: ProcessGroups) -> None:
        """Make the process groups (collective). Called first."""

    @abstractmethod
    def _holds(self, cut: Cut) -> bool:
        """Whether the parameter is in this rank's buffer."""

    @abstractmethod
    def _numel(self, cut: Cut) -> int:
        """Return how many elements of it are."""

    @abstractmethod
    def _group(self, cut: Cut) -> Group:
        """Return the ranks among which it is gathered."""

    @abstractmethod
    def _pieces(self, cut: Cut) -> list[Piece]:
        """Return which of them has which part."""

    @abstractmethod
    def _slot(self, cut: Cut, flat: Tensor) -> Tensor:
        """Return the place of this rank's training shard in the parameter's run, in the shard's shape."""

    @abstractmethod
    def _shard(self, cut: Cut, flat: Tensor) -> Tensor:
        """Return this rank's generating shard from the parameter's run."""


class _ByTensorShards(Reshard):
    """Gathers shards of the training layout: `self._shards` of each of `self._stages`, among neighbouring ranks."""

    _stages: range
    _shards: range
    _peers: Group
    _same_shard: Group

    def _holds(self, cut: Cut) -> bool:
        return any(stage in cut.stages for stage in self._stages)

    def _numel(self, cut: Cut) -> int:
        whole = torch.Size(cut.shape).numel()
        return whole if cut.dim is None else whole * len(self._shards) // self.layout.training.tp

    def _group(self, cut: Cut) -> Group:
        # What tensor ranks do not divide is known to all of a stage: only ranks of other stages have to be told.
        return self._same_shard if cut.dim is None else self._peers

    def _pieces(self, cut: Cut) -> list[Piece]:
        if cut.dim is None and all(stage in cut.stages for stage in self._stages):
            return []
        # Tied embeddings are on two stages; the first one's are taken.
        stage = next(stage for stage in self._stages if stage in cut.stages)
        there = [rank for rank in self._group(cut).ranks if self.layout.training.place(rank).pp == stage]
        size = self._numel(cut) // len(there)
        return [Piece(rank, index * size, (index + 1) * size) for index, rank in enumerate(there)]

    def _slot_run(self, cut: Cut, flat: Tensor) -> Tensor:
        """Return the elements of this rank's training shard in the parameter's run."""
        if cut.dim is None:
            return flat
        size = flat.numel() // len(self._shards)
        start = (self.place.tp - self._shards.start) * size
        return flat[start : start + size]

    def _slot(self, cut: Cut, flat: Tensor) -> Tensor:
        return self._cut_first(cut, self._slot_run(cut, flat))


class HybridFlow(_ByTensorShards):
    """Gathers inside micro-DP groups, in place: (t p - t_g p_g) / (t_g p_g t p) M a rank; redundancy 0.

    Training shards that live in their `slots` of the buffer are not copied.
    """

    def __init__(self, layout: GenerationLayout, *args: Any, **kwargs: Any) -> None:
        if layout.vanilla:
            raise ConfigError("the vanilla grouping parts training shards from generating ones: nothing is in place")
        super().__init__(layout, *args, **kwargs)

    @property
    def slots(self) -> dict[str, Tensor]:
        """The place of each of this rank's training shards in the buffer, in the shard's shape."""
        return {name: self._slot(cut, self._flat(name)) for name, cut in self.cuts.items() if self._gives(cut)}

    @property
    def slot_runs(self) -> dict[str, Tensor]:
        """The same places as runs of elements, in the order of memory."""
        return {name: self._slot_run(cut, self._flat(name)) for name, cut in self.cuts.items() if self._gives(cut)}

    def _join(self, groups: ProcessGroups) -> None:
        self._stages, self._shards = self.layout.stages(self.rank), self.layout.tensor_shards(self.rank)
        micro_dp = self.layout.groups("micro_dp")
        self._peers = groups.own(micro_dp)
        self._same_shard = groups.own(_by_tensor_place(self.layout, micro_dp))

    def _shard(self, cut: Cut, flat: Tensor) -> Tensor:
        return self._cut_first(cut, flat)


class ModelParallel(_ByTensorShards):
    """Gathers the whole model inside each training copy (HybridFlow-V): (t p - 1) / (t p) M a rank, peak M."""

    def _join(self, groups: ProcessGroups) -> None:
        training = self.layout.training
        self._stages, self._shards = range(training.pp), range(training.tp)
        size = training.pp * training.tp
        copies = [list(range(copy * size, (copy + 1) * size)) for copy in range(training.dp)]
        self._peers = groups.own(copies)
        self._same_shard = groups.own(_by_tensor_place(self.layout, copies))

    def _shard(self, cut: Cut, flat: Tensor) -> Tensor:
        return _generating_part(self.layout, self.rank, cut, self._cut_first(cut, flat))


class AllRanks(Reshard):
    """Gathers the whole model from flat shards over all ranks (DeepSpeed-Chat): (N - 1) / N M a rank, peak M.

    Whatever the layout, training has parameter by parameter the rank-th of N runs of its elements, as ZeRO-3 does
    (`flat_pieces`).
    """

    def _holds(self, cut: Cut) -> bool:
        return True

    def _numel(self, cut: Cut) -> int:
        return torch.Size(cut.shape).numel()

    def _join(self, groups: ProcessGroups) -> None:
        self._everyone = groups.own([range(self.layout.training.world_size)])

    def _group(self, cut: Cut) -> Group:
        return self._everyone

    def _gives(self, cut: Cut) -> bool:
        return True

    def _pieces(self, cut: Cut) -> list[Piece]:
        return flat_pieces(self._numel(cut), self._everyone.ranks)

    def _slot(self, cut: Cut, flat: Tensor) -> Tensor:
        piece = self._pieces(cut)[self.rank]
        return flat[piece.start : piece.stop]

    def _shard(self, cut: Cut, flat: Tensor) -> Tensor:
        return _generating_part(self.layout, self.rank, cut, flat.view(cut.shape))


STRATEGIES: dict[str, type[Reshard]] = {
    "hybridflow": HybridFlow,
    "model_parallel": ModelParallel,
    "all_ranks": AllRanks,
}


def flat_pieces(elements: int, ranks: Iterable[int]) -> list[Piece]:
    """Return the runs of elements of a tensor that is cut flat over `ranks`; they differ by one element at most."""
    ranks = list(ranks)
    ends = [elements * index // len(ranks) for index in range(len(ranks) + 1)]
    return [Piece(rank, *run) for rank, run in zip(ranks, pairwise(ends), strict=True)]


def gather_data_parallel(reshard: HybridFlow, group: Group, meter: Meter) -> None:
    """Complete, in place, training shards that are cut flat over data-parallel ranks (FSDP): (d - 1) / d of each.

    Each rank of `group` has its part (`flat_pieces`) of each of `slot_runs` there.
    """
    works = []
    for flat in reshard.slot_runs.values():
        works += meter.exchange(flat, flat_pieces(len(flat), group.ranks), group, reshard.rank)
    for work in works:
        work.wait()


def _by_tensor_place(layout: GenerationLayout, groups: list[list[int]]) -> list[list[int]]:
    """Split groups into those of the ranks with the same training tensor shard."""
    parts: list[list[int]] = []
    for group in groups:
        by_tp: dict[int, list[int]] = {}
        for rank in group:
            by_tp.setdefault(layout.training.place(rank).tp, []).append(rank)
        parts += by_tp.values()
    return parts


def _generating_part(layout: GenerationLayout, rank: int, cut: Cut, whole: Tensor) -> Tensor:
    if cut.dim is None:
        return whole
    shards = layout.tensor_shards(rank)
    size = cut.shape[cut.dim] // layout.training.tp
    return whole.narrow(cut.dim, shards.start * size, len(shards) * size)
