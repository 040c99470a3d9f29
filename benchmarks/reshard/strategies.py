"""The strategies that HybridFlow compares with (arXiv 2409.19256, Table 2), on the code that a run reshards with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from rlcore.engine.parallel.layout import ShardSpec
from rlcore.engine.weights.generation import GenerationCoordinates, GenerationLayout
from rlcore.engine.weights.meter import Group, Piece, ProcessGroups
from rlcore.engine.weights.reshard import Reshard, by_tensor_shard


class ConsecutiveGroups(GenerationLayout):
    """Tensor groups of consecutive ranks (the paper's vanilla grouping): a training shard may lie outside its own."""

    def coordinates(self, rank: int) -> GenerationCoordinates:
        at = self.training.coordinates(rank)
        within = at.pp * self.training.tp + at.tp
        return GenerationCoordinates(
            pp=within // self.tp % self.pp, tp=within % self.tp, micro_dp=within // (self.tp * self.pp), dp=at.dp
        )


class ModelParallel(Reshard):
    """Gathers the whole model inside each training copy (HybridFlow-V): (t p - 1) / (t p) M a rank, peak M."""

    def _join(self, groups: ProcessGroups) -> None:
        training = self.layout.training
        self._stages, self._shards = range(training.pp), range(training.tp)
        size = training.pp * training.tp
        copies = [list(range(copy * size, (copy + 1) * size)) for copy in range(training.dp)]
        self._peers = groups.own(copies)
        self._same_shard = groups.own(by_tensor_shard(self.layout, copies))

    def _shard(self, cut: ShardSpec, flat: Tensor) -> Tensor:
        return _generating_part(self.layout, self.rank, cut, self._cut_first(cut, flat))


class AllRanks(Reshard):
    """Gathers the whole model from flat shards over all ranks (DeepSpeed-Chat): (N - 1) / N M a rank, peak M.

    Whatever the layout, training has parameter by parameter the rank-th of N runs of its elements, as ZeRO-3 does.
    """

    def _holds(self, cut: ShardSpec) -> bool:
        return True

    def _numel(self, cut: ShardSpec) -> int:
        return torch.Size(cut.shape).numel()

    def _join(self, groups: ProcessGroups) -> None:
        self._everyone = groups.own([range(self.layout.training.world_size)])

    def _group(self, cut: ShardSpec) -> Group:
        return self._everyone

    def _gives(self, cut: ShardSpec) -> bool:
        return True

    def _pieces(self, cut: ShardSpec) -> list[Piece]:
        return flat_pieces(self._numel(cut), self._everyone.ranks)

    def _slot(self, cut: ShardSpec, flat: Tensor) -> Tensor:
        piece = self._pieces(cut)[self.rank]
        return flat[piece.start : piece.stop]

    def _shard(self, cut: ShardSpec, flat: Tensor) -> Tensor:
        return _generating_part(self.layout, self.rank, cut, flat.view(cut.shape))


def flat_pieces(elements: int, ranks: Iterable[int]) -> list[Piece]:
    """Return the runs of elements of a tensor that is cut flat over `ranks`; they differ by one element at most."""
    ranks = list(ranks)
    ends = [elements * index // len(ranks) for index in range(len(ranks) + 1)]
    return [Piece(rank, *run) for rank, run in zip(ranks, pairwise(ends), strict=True)]


def _generating_part(layout: GenerationLayout, rank: int, cut: ShardSpec, whole: Tensor) -> Tensor:
    if cut.dim is None:
        return whole
    shards = layout.tensor_shards(rank)
    size = cut.shape[cut.dim] // layout.training.tp
    return whole.narrow(cut.dim, shards.start * size, len(shards) * size)


STRATEGIES: dict[str, type[Reshard]] = {"hybridflow": Reshard, "model_parallel": ModelParallel, "all_ranks": AllRanks}
