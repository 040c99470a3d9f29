"""The mesh: each rank's coordinates along pipeline, tensor and data parallelism."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlcore.errors import ConfigError, did_you_mean

AXES = ("pp", "tp", "dp", "micro_dp")
"""Axes of a mesh: pipeline stage, tensor-parallel rank, data-parallel rank, and generating replica.

A training replica may generate as several smaller replicas; `micro_dp` numbers these.
"""


def check_axes(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not an axis of a mesh."""
    for name in names:
        if name not in AXES:
            raise ConfigError(f"a mesh has no axis {name!r}; there are {', '.join(AXES)}.{did_you_mean(name, AXES)}")


@dataclass(frozen=True)
class Mesh:
    """The mesh coordinates of each rank: `coordinates[rank][axis]`, from 0. An axis that no rank declares has size 1.

    Raises ConfigError when ranks declare different axes, when a position along pp, tp and dp has no rank, and when two
    ranks that declare all three axes have the same position.
    """

    coordinates: tuple[Mapping[str, int], ...]

    def __post_init__(self) -> None:
        check_axes(self.axes)
        for rank, at in enumerate(self.coordinates):
            if set(at) != set(self.axes):
                raise ConfigError(
                    f"set_mesh: rank {rank} declares the axes {sorted(at)}, rank 0 {sorted(self.axes)}. "
                    "Declare the same axes on every rank."
                )
        axes = [axis for axis in ("pp", "tp", "dp") if axis in self.axes]
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self.coordinates):
            ranks.setdefault(tuple(at[axis] for axis in axes), []).append(rank)
        shared = [f"ranks {there} are all at {_position(axes, at)}" for at, there in ranks.items() if len(there) > 1]
        # The ranks along an undeclared axis share a position.
        self._check_positions(axes, set(ranks), shared if len(axes) == 3 else [])

    def _check_positions(
        self, axes: Sequence[str], filled: Collection[tuple[int, ...]], faults: Sequence[str] = ()
    ) -> None:
        """Raise ConfigError when there are faults, or a position along `axes` has no rank."""
        count = math.prod(map(self.size, axes))
        if not faults and len(filled) == count:
            return
        every = itertools.product(*map(range, map(self.size, axes)))
        empty = [at for at in itertools.islice(every, len(filled) + 1) if at not in filled]
        found = [*faults[:3], *(f"no rank is at {_position(axes, at)}" for at in empty[:3])]
        raise ConfigError(
            f"set_mesh: {len(self.coordinates)} ranks declare {count} positions along {', '.join(axes)}: "
            f"{'; '.join(found)}. Every position needs a rank; with pp, tp and dp declared, each rank needs its own "
            f"position. Declared: "
            f"{_shortened([f'rank {rank}: {dict(at)}' for rank, at in enumerate(self.coordinates)])}."
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that the workers declared."""
        return tuple(self.coordinates[0])

    def size(self, axis: str) -> int:
        """Return the size of an axis: 1 if no worker declared it. Raises ConfigError for an unknown axis."""
        return 1 + max(self.at(rank, axis) for rank in range(len(self.coordinates)))

    def at(self, rank: int, axis: str) -> int:
        """Return a rank's coordinate along an axis: 0 if no worker declared it. ConfigError for an unknown axis."""
        check_axes([axis])
        return self.coordinates[rank].get(axis, 0)

    def slices(self, axes: Sequence[str]) -> tuple[list[int], int]:
        """Return each rank's slice number when rows are split over `axes`, and the number of slices.

        The first axis varies slowest. Raises ConfigError when a slice has no rank.
        """
        positions = [self._position(rank, axes) for rank in range(len(self.coordinates))]
        self._check_positions(axes, set(positions))
        numbers = {position: number for number, position in enumerate(sorted(set(positions)))}
        return [numbers[position] for position in positions], len(numbers)

    def _position(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.at(rank, axis) for axis in axes)

    def sources(self, axes: Sequence[str], collected_at: Mapping[str, int]) -> list[int]:
        """Return, for each slice over `axes`, the rank whose result counts: its lowest rank at `collected_at`.

        A coordinate of -1 is the last along its axis. Raises ConfigError when a slice has no such rank.
        """
        numbers, count = self.slices(axes)
        wanted = {axis: at % self.size(axis) for axis, at in collected_at.items()}
        source: dict[int, int] = {}
        for rank, number in enumerate(numbers):
            if all(self.at(rank, axis) == at for axis, at in wanted.items()):
                source.setdefault(number, rank)
        if len(source) < count:
            number = min(set(range(count)) - set(source))
            there = [rank for rank, its in enumerate(numbers) if its == number]
            raise ConfigError(
                f"none of the ranks {there}, which get the same rows, is at {wanted}, where results are collected. "
                "Correct the coordinates given to set_mesh."
            )
        return [source[number] for number in range(count)]


def _position(axes: Sequence[str], at: Sequence[int]) -> str:
    return ", ".join(f"{axis}={number}" for axis, number in zip(axes, at, strict=True))


def _shortened(texts: Sequence[str]) -> str:
    return ", ".join(texts[:16]) + (f" and {len(texts) - 16} more" if len(texts) > 16 else "")
