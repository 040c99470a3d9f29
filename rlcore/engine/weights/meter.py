"""The collectives and buffers of a reshard, which count the bytes that they send and hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the function.
_all_gather_in_place: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """Some ranks, in ascending order, and their torch process group. `handle` None: this rank is the only one."""

    ranks: tuple[int, ...]
    handle: Any = None


class ProcessGroups:
    """torch's process groups by their ranks, each created once. All ranks request the same groups in the same order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._made: dict[tuple[int, ...], Group] = {}

    def own(self, groups: Sequence[Sequence[int]]) -> Group:
        """Return the one of `groups` that contains this rank (collective)."""
        # Every rank creates all groups, also those of other ranks: new_group is a collective of the whole world.
        for ranks in (tuple(sorted(group)) for group in groups):
            if ranks not in self._made:
                self._made[ranks] = Group(ranks, dist.new_group(list(ranks)) if len(ranks) > 1 else None)
        return next(self._made[tuple(sorted(group))] for group in groups if self.rank in group)


@dataclass(frozen=True)
class Piece:
    """The elements `start` to `stop` of a flat tensor, held by `rank`."""

    rank: int
    start: int
    stop: int


@dataclass
class Meter:
    """Counts of this rank in bytes.

    `received` from other ranks and `copied` within the process, over all switches. `held` in buffers now, and `peak`,
    the largest value of `held`. `redundant`: training weights that the last switch left in memory a second time,
    outside the buffer.
    """

    received: int = 0
    copied: int = 0
    held: int = 0
    peak: int = 0
    redundant: int = 0

    def report(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, counted in `held` until `free`."""
        buffer = torch.empty(elements, dtype=dtype, device=device)
        self.held += buffer.nbytes
        self.peak = max(self.peak, self.held)
        return buffer

    def free(self, buffer: Tensor) -> None:
        """Stop counting a buffer of `allocate`; its memory is freed with the last tensor that shares it."""
        self.held -= buffer.nbytes

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor; does nothing if source and target are the same memory."""
        if source.data_ptr() != target.data_ptr() or source.stride() != target.stride():
            target.copy_(source)
            self.copied += target.nbytes

    def exchange(self, flat: Tensor, pieces: Sequence[Piece], group: Group, rank: int) -> list[Any]:
        """Bring every piece of a flat tensor to every rank of the group, in place; return handles to wait for.

        Equal pieces in rank order take one all-gather; otherwise each piece is broadcast.
        """
        if group.handle is None:
            return []
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        self.received += sum(flat.itemsize * (piece.stop - piece.start) for piece in pieces if piece.rank != rank)
        if _is_even(pieces, group):
            own = next(piece for piece in pieces if piece.rank == rank)
            return [_all_gather_in_place(flat, flat[own.start : own.stop], group=group.handle, async_op=True)]
        return [
            dist.broadcast(flat[piece.start : piece.stop], src=piece.rank, group=group.handle, async_op=True)
            for piece in pieces
        ]


def _is_even(pieces: Sequence[Piece], group: Group) -> bool:
    sizes = {piece.stop - piece.start for piece in pieces}
    return len(sizes) == 1 and tuple(piece.rank for piece in pieces) == group.ranks
