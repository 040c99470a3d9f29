"""How a model is spread over ranks: pipeline stages, tensor shards, data-parallel copies."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank on each axis of a Layout, from 0."""

    pp: int
    tp: int
    dp: int


@dataclass(frozen=True)
class Layout:
    """`pp` pipeline stages x `tp` tensor shards x `dp` data-parallel copies.

    Ranks are numbered as in HybridFlow (arXiv 2409.19256, section 5.1): first along tp, then pp, then dp:
    rank = (dp * stages + pp) * shards + tp.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "tp", "dp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"a layout's {axis} must be at least 1, not {getattr(self, axis)}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.tp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        copy, within = divmod(rank, self.pp * self.tp)
        return Coordinates(pp=within // self.tp, tp=within % self.tp, dp=copy)

    def rank(self, at: Coordinates) -> int:
        """Return the rank with these coordinates."""
        return (at.dp * self.pp + at.pp) * self.tp + at.tp


@dataclass(frozen=True)
class ShardSpec:
    """How a layout divides one parameter: the `stages` that hold it, and the dimension `dim` that tensor ranks divide.

    `shape` is that of the whole parameter. `dim` None: every tensor rank of its stages holds it whole. Tied embeddings
    are on two stages.
    """

    shape: tuple[int, ...]
    stages: tuple[int, ...]
    dim: int | None = None
