"""The coordinates of a training layout's ranks while they generate (HybridFlow, arXiv 2409.19256, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.engine.parallel.layout import Layout
from rlcore.errors import ConfigError

Axis = Literal["pp", "tp", "micro_dp"]


@dataclass(frozen=True)
class GenerationCoordinates:
    """The coordinates of a rank while it generates, from 0; `dp` is its copy of the training layout."""

    pp: int
    tp: int
    micro_dp: int
    dp: int


@dataclass(frozen=True)
class GenerationLayout:
    """`pp` stages x `tp` tensor shards; each training copy generates as `micro_dp` replicas of them.

    A generating stage is `training.pp / pp` neighbouring training stages, a generating tensor shard `training.tp / tp`
    neighbouring training shards. In the paper's grouping each rank gets the generating shard that contains its training
    shard: tensor groups are ranks at intervals of `training.tp / tp`, micro-DP groups are neighbours.

    Raises ConfigError when `pp` or `tp` does not divide training's.
    """

    training: Layout
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "tp"):
            asked, trained = getattr(self, axis), getattr(self.training, axis)
            if asked < 1 or trained % asked:
                possible = ", ".join(str(n) for n in range(1, trained + 1) if trained % n == 0)
                raise ConfigError(
                    f"rollout.{axis}={asked} does not divide engine.{axis}={trained}, so generating shards "
                    f"cannot be made from training shards. With engine.{axis}={trained}, rollout.{axis} can be "
                    f"{possible}; for {asked}, set engine.{axis} to a multiple of it."
                )

    @property
    def micro_dp(self) -> int:
        """The number of generating replicas of a training copy."""
        return self.training.pp * self.training.tp // (self.pp * self.tp)

    @property
    def replicas(self) -> int:
        """The number of generating replicas."""
        return self.training.dp * self.micro_dp

    def coordinates(self, rank: int) -> GenerationCoordinates:
        """Return the coordinates of a rank."""
        at = self.training.coordinates(rank)
        tp, tp_part = divmod(at.tp, self.training.tp // self.tp)
        pp, pp_part = divmod(at.pp, self.training.pp // self.pp)
        return GenerationCoordinates(pp=pp, tp=tp, micro_dp=pp_part * (self.training.tp // self.tp) + tp_part, dp=at.dp)

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ only along `axis`, each in the order of that axis."""
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank in range(self.training.world_size):
            at = vars(self.coordinates(rank))
            others = tuple(value for name, value in at.items() if name != axis)
            groups.setdefault(others, []).append((at[axis], rank))
        ordered = []
        for group in groups.values():
            ordered.append([rank for _, rank in sorted(group)])
        return sorted(ordered)

    def stages(self, rank: int) -> range:
        """Return the training stages in a rank's generating shard."""
        count = self.training.pp // self.pp
        return range(self.coordinates(rank).pp * count, (self.coordinates(rank).pp + 1) * count)

    def tensor_shards(self, rank: int) -> range:
        """Return the training tensor shards in a rank's generating shard."""
        count = self.training.tp // self.tp
        return range(self.coordinates(rank).tp * count, (self.coordinates(rank).tp + 1) * count)

    def reuses(self, rank: int) -> bool:
        """Whether the rank's generating shard contains its training shard."""
        at = self.training.coordinates(rank)
        return at.pp in self.stages(rank) and at.tp in self.tensor_shards(rank)

    @property
    def engine_order(self) -> list[int]:
        """The numbering of the ranks in an engine whose groups are consecutive ranks (vLLM).

        `engine_order[i]` is the training rank with number i in the engine. Tensor groups are consecutive, then the
        stages of a replica, then the replicas.
        """

        def key(rank: int) -> tuple[int, ...]:
            at = self.coordinates(rank)
            return (at.dp, at.micro_dp, at.pp, at.tp)

        return sorted(range(self.training.world_size), key=key)
