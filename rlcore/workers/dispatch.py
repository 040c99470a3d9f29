"""Dispatch modes: how a group cuts a call's arguments up for its ranks and joins their results.

A mode is two functions. `distribute(group, *args, **kwargs)` returns, for every argument, the list of what each rank
gets; `collect(group, outputs)` turns the list of every rank's result (None for a rank that was not called) into the
call's. Both see each rank's place in the mesh as `group.mesh`. (HybridFlow, arXiv 2409.19256, Table 3.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypedDict

import torch

from rlcore.errors import ConfigError, DataError, did_you_mean
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.balance import SplitBatch

PerRank: TypeAlias = tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]
"""For every positional and keyword argument, the list of what each rank gets."""


class CustomDispatch(TypedDict):
    """A user's own mode: a pair of functions over the group."""

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[[Any, list[Any]], Any]


AXES = ("pp", "tp", "dp", "micro_dp")
"""Axes of a mesh: pipeline stage, tensor-parallel rank, data-parallel rank; and, where a training replica generates as
several smaller ones, which of those a rank belongs to."""


def check_axes(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is no axis of a mesh."""
    for name in names:
        if name not in AXES:
            raise ConfigError(f"a mesh has no axis {name!r}; there are {', '.join(AXES)}.{did_you_mean(name, AXES)}")


@dataclass(frozen=True)
class Mesh:
    """Each rank's place: `coordinates[rank][axis]`, from 0. An axis of AXES that no rank declares has one place.

    Raises ConfigError when ranks declare different axes, when a place along pp, tp and dp has no rank, and when two
    ranks that declare all three stand at the same place.
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
        shared = [f"ranks {there} are all at {_place(axes, at)}" for at, there in ranks.items() if len(there) > 1]
        # With an axis left out, the ranks along it share a place.
        self._refuse(axes, set(ranks), shared if len(axes) == 3 else [])

    def _refuse(self, axes: Sequence[str], filled: Collection[tuple[int, ...]], wrong: Sequence[str] = ()) -> None:
        """Raise ConfigError when there is something wrong, or a place along `axes` is not among those filled."""
        count = math.prod(map(self.size, axes))
        if not wrong and len(filled) == count:
            return
        every = itertools.product(*(range(self.size(axis)) for axis in axes))
        empty = [at for at in itertools.islice(every, len(filled) + 1) if at not in filled]
        found = [*wrong[:3], *(f"no rank is at {_place(axes, at)}" for at in empty[:3])]
        raise ConfigError(
            f"set_mesh: {len(self.coordinates)} ranks declare {count} places along {', '.join(axes)}: "
            f"{'; '.join(found)}. Every place needs a rank; with pp, tp and dp declared, each rank has a place of its "
            f"own. Declared: {_shortened([f'rank {rank}: {dict(at)}' for rank, at in enumerate(self.coordinates)])}."
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that the workers declared."""
        return tuple(self.coordinates[0])

    def size(self, axis: str) -> int:
        """Return the number of places along an axis: 1 where no worker declared it. ConfigError for one not in AXES."""
        return 1 + max(self.at(rank, axis) for rank in range(len(self.coordinates)))

    def at(self, rank: int, axis: str) -> int:
        """Return a rank's place along an axis: 0 where no worker declared it. ConfigError for one not in AXES."""
        check_axes([axis])
        return self.coordinates[rank].get(axis, 0)

    def slices(self, axes: Sequence[str]) -> tuple[list[int], int]:
        """Return each rank's slice number when rows are cut over `axes` (first axis slowest), and how many there are.

        Raises ConfigError when some slice has no rank.
        """
        places = [tuple(self.at(rank, axis) for axis in axes) for rank in range(len(self.coordinates))]
        self._refuse(axes, set(places))
        numbers = {place: number for number, place in enumerate(sorted(set(places)))}
        return [numbers[place] for place in places], len(numbers)

    def sources(self, axes: Sequence[str], collected_at: Mapping[str, int]) -> list[int]:
        """Return the rank that answers for each slice over `axes`: the lowest there that stands at `collected_at`.

        A place of -1 is the last of its axis. Raises ConfigError when some slice has no such rank.
        """
        numbers, count = self.slices(axes)
        wanted = {axis: place % self.size(axis) for axis, place in collected_at.items()}
        source: dict[int, int] = {}
        for rank, number in enumerate(numbers):
            if all(self.at(rank, axis) == place for axis, place in wanted.items()):
                source.setdefault(number, rank)
        if len(source) < count:
            number = min(set(range(count)) - set(source))
            there = [rank for rank, its in enumerate(numbers) if its == number]
            raise ConfigError(
                f"none of the ranks {there}, which get the same rows, is at {wanted}, where results are collected. "
                "Correct the coordinates given to set_mesh."
            )
        return [source[number] for number in range(count)]


def _place(axes: Sequence[str], at: Sequence[int]) -> str:
    return ", ".join(f"{axis}={number}" for axis, number in zip(axes, at, strict=True))


def _shortened(texts: Sequence[str]) -> str:
    return ", ".join(texts[:16]) + (f" and {len(texts) - 16} more" if len(texts) > 16 else "")


@dataclass(frozen=True)
class DispatchMode:
    """A pair of functions, and two marks: non-blocking calls give a deferred DataProto; rank 0 alone is called."""

    name: str
    distribute: Callable[..., Any]
    collect: Callable[[Any, list[Any]], Any]
    joins_rows: bool = False
    only_rank_zero: bool = False


def broadcast(group: Any, *args: Any, **kwargs: Any) -> PerRank:
    """Give every rank the same arguments."""
    n = group.world_size
    return [[value] * n for value in args], {name: [value] * n for name, value in kwargs.items()}


def per_worker(group: Any, *args: Any, **kwargs: Any) -> PerRank:
    """Take every argument as the list of what each rank gets. Raises DataError for a list of another length."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        _check_list("ALL_TO_ALL", name, value, group.world_size, "workers")
    return args, kwargs


def _check_list(mode: str, name: object, value: Any, length: int, of: str) -> None:
    if not isinstance(value, (list, tuple)) or len(value) != length:
        got = f"{len(value)} values" if isinstance(value, (list, tuple)) else type(value).__name__
        raise DataError(
            f"{mode}: argument {name!r} is {got}; give a list with one value for each of the {length} {of}, or use "
            "Dispatch.ONE_TO_ALL to give all the same."
        )


def gather(group: Any, outputs: list[Any]) -> list[Any]:
    """Return every rank's result, in rank order."""
    return outputs


def first(group: Any, outputs: list[Any]) -> Any:
    """Return rank 0's result."""
    return outputs[0]


def split_rows(value: Any, parts: int) -> list[Any]:
    """Return `value` cut into `parts`: a DataProto (also inside lists, tuples and dicts) by rows, anything else whole.

    Row counts differ by one at most, the larger ones first; with fewer rows than parts the last parts have none.
    A SplitBatch is split already; DataError when it has another number of parts.
    """
    if isinstance(value, SplitBatch):
        if len(value.parts) != parts:
            raise DataError(f"a batch that was cut into {len(value.parts)} is to be cut into {parts}; pass it whole")
        return list(value.parts)
    if isinstance(value, DataProto):
        small, larger = divmod(len(value), parts)
        ends = [part * small + min(part, larger) for part in range(parts + 1)]
        return [value[start:end] for start, end in itertools.pairwise(ends)]
    if type(value) in (list, tuple) and any(_holds_rows(item) for item in value):
        return [type(value)(items) for items in zip(*(split_rows(item, parts) for item in value), strict=True)]
    if type(value) is dict and any(_holds_rows(item) for item in value.values()):
        columns = zip(*(split_rows(item, parts) for item in value.values()), strict=True)
        return [dict(zip(value, items, strict=True)) for items in columns]
    return [value] * parts


def _holds_rows(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(_holds_rows(item) for item in value)
    if type(value) is dict:
        return any(_holds_rows(item) for item in value.values())
    return isinstance(value, (DataProto, SplitBatch))


def join_rows(outputs: Sequence[Any]) -> Any:
    """Return the results one after the other: DataProtos, Ragged columns, tensors or lists; None when all are None.

    DataProtos without rows add nothing, whatever their columns. Raises DataError for other or mixed types.
    """
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, DataProto) for output in outputs):
        with_rows = [output for output in outputs if len(output)]
        return DataProto.concat(with_rows) if with_rows else outputs[0]
    if all(isinstance(output, Ragged) for output in outputs):
        return Ragged.cat(list(outputs))
    if all(isinstance(output, torch.Tensor) and output.ndim for output in outputs):
        return torch.cat(list(outputs))
    if all(type(output) is list for output in outputs):
        return list(itertools.chain.from_iterable(outputs))
    kinds = sorted({type(output).__name__ for output in outputs})
    raise DataError(
        f"results of type {', '.join(kinds)} cannot be joined by rows; return a DataProto (or a tensor or list with "
        "one row a sample) on every rank, or register the method with a mode that collects them otherwise."
    )


def cut_over(*axes: str) -> Callable[..., PerRank]:
    """Return the function that cuts rows over the places along `axes`; all ranks at a place get the same object.

    Rows are cut over the first axis, and each part over the next: so a training replica's generating ones have
    together the rows that a mode over dp alone gives the training replica.
    """

    def distribute(group: Any, *args: Any, **kwargs: Any) -> PerRank:
        numbers, _ = group.mesh.slices(axes)

        def ranked(value: Any) -> list[Any]:
            parts = [value]
            for axis in axes:
                parts = [piece for part in parts for piece in split_rows(part, group.mesh.size(axis))]
            return [parts[number] for number in numbers]

        return [ranked(value) for value in args], {name: ranked(value) for name, value in kwargs.items()}

    return distribute


def joined_from(*axes: str, **collected_at: int) -> Callable[[Any, list[Any]], Any]:
    """Return the function that joins the results of one rank of each place along `axes` (see Mesh.sources)."""

    def collect(group: Any, outputs: list[Any]) -> Any:
        return join_rows([outputs[rank] for rank in group.mesh.sources(axes, collected_at)])

    return collect


def rows_over(name: str, *axes: str, **collected_at: int) -> DispatchMode:
    """Return the mode that cuts rows over the places along `axes` and joins the results of one rank of each place.

    All ranks at a place get its rows. The result is taken from the lowest rank there that also stands at
    `collected_at` (-1: the last place of that axis).
    """
    return DispatchMode(name, cut_over(*axes), joined_from(*axes, **collected_at), joins_rows=True)


def per_dp_rank(group: Any, *args: Any, **kwargs: Any) -> PerRank:
    """Take every argument as the list of what each data-parallel rank gets. DataError for a list of another length."""
    numbers, count = group.mesh.slices(["dp"])
    for name, value in [*enumerate(args), *kwargs.items()]:
        _check_list("DP_COMPUTE", name, value, count, "data-parallel ranks")

    def ranked(value: Sequence[Any]) -> list[Any]:
        return [value[number] for number in numbers]

    return [ranked(value) for value in args], {name: ranked(value) for name, value in kwargs.items()}


def each_dp_rank(group: Any, outputs: list[Any]) -> list[Any]:
    """Return the result of each data-parallel rank: that of the lowest rank there."""
    return [outputs[rank] for rank in group.mesh.sources(["dp"], {})]


def with_function(group: Any, *args: Any, **kwargs: Any) -> PerRank:
    """Give every rank the first argument, a function, and cut the rows of the others. DataError for no function."""
    if not args or not callable(args[0]):
        got = f"{type(args[0]).__name__} {args[0]!r:.80}" if args else "none"
        raise DataError(
            f"DP_COMPUTE_PROTO_WITH_FUNC: the first positional argument must be a function, got {got}; pass the "
            "function first, or use Dispatch.DP_COMPUTE_PROTO."
        )
    lists, named = cut_over("dp")(group, *args[1:], **kwargs)
    return [[args[0]] * group.world_size, *lists], named


class Dispatch(Enum):
    """The modes that `register` knows by name. Places in the mesh are those that the workers gave to `set_mesh`."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", broadcast, gather)
    """Every rank gets the same arguments; the list of all results."""
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", per_worker, gather)
    """Every argument is a list with one value a rank; the list of all results."""
    RANK_ZERO = DispatchMode("RANK_ZERO", broadcast, first, only_rank_zero=True)
    """Only rank 0 is called; its result."""
    PROTO_3D = rows_over("PROTO_3D", "dp", pp=-1, tp=0)
    """Rows cut over dp, the same for all pp and tp; results of the last stage's tp=0 joined (paper: 3D_PROTO)."""
    ALL_MICRO_DP_3D = rows_over("ALL_MICRO_DP_3D", "dp", "micro_dp")
    """Rows cut over dp and micro_dp, one slice for each generating replica; results of the lowest rank of each joined.

    (Paper: 3D_ALL_MICRO_DP, whose "micro-DP group" must be read as the ranks that hold one generating replica.)
    """
    PP_ONLY_3D = DispatchMode("PP_ONLY_3D", broadcast, joined_from("pp", tp=0, dp=0))
    """Every rank gets the same arguments; results of tp=0, dp=0 of every stage joined (paper: 3D_PP_ONLY)."""
    DP_COMPUTE = DispatchMode("DP_COMPUTE", per_dp_rank, each_dp_rank)
    """Every argument is a list with one value a data-parallel rank; the list of those ranks' results."""
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", cut_over("dp"), each_dp_rank)
    """Rows cut over the data-parallel ranks; the list of their results, not joined."""
    DP_COMPUTE_PROTO = rows_over("DP_COMPUTE_PROTO", "dp")
    """Rows cut over the data-parallel ranks, every one of which is called, with no rows if need be; results joined
    (paper: DP_PROTO)."""
    ALL_RANKS_PROTO = rows_over("ALL_RANKS_PROTO", "dp", "pp", "tp")
    """Rows cut over all ranks, whatever their stage and tensor shard; all results joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", with_function, joined_from("dp"), joins_rows=True
    )
    """As DP_COMPUTE_PROTO; the first argument is a function, which all ranks get."""

    @classmethod
    def from_paper(cls, name: str) -> Dispatch:
        """Return the mode that HybridFlow's Table 3 calls `name`, such as "3D_PROTO". ConfigError for another name."""
        if name not in PAPER_NAMES:
            raise ConfigError(
                f"HybridFlow's Table 3 has no transfer protocol {name!r}; it names {', '.join(PAPER_NAMES)}."
                f"{did_you_mean(name, PAPER_NAMES)}"
            )
        return cls[PAPER_NAMES[name]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by name; a mode's functions need not travel."""
        return getattr, (Dispatch, self.name)


PAPER_NAMES = {
    "ONE_TO_ALL": "ONE_TO_ALL",
    "3D_PROTO": "PROTO_3D",
    "3D_ALL_MICRO_DP": "ALL_MICRO_DP_3D",
    "3D_PP_ONLY": "PP_ONLY_3D",
    "DP_PROTO": "DP_COMPUTE_PROTO",
    "ALL_TO_ALL": "ALL_TO_ALL",
}
"""The transfer protocols of HybridFlow's Table 3, and the modes that they are here."""


class Execute(Enum):
    """On which ranks a method runs; `RANK_ZERO` calls rank 0 alone and returns its result as it is."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


def as_mode(mode: Dispatch | CustomDispatch) -> Dispatch | DispatchMode:
    """Return a named mode, or a user's pair of functions as one. Raises ConfigError for anything else."""
    if isinstance(mode, Dispatch):
        return mode
    is_pair = isinstance(mode, dict) and set(mode) == {"dispatch_fn", "collect_fn"}
    if not is_pair or not all(callable(function) for function in mode.values()):
        raise ConfigError(
            f"dispatch_mode={mode!r} is neither one of {[known.name for known in Dispatch]} nor a dict of two "
            "functions, {'dispatch_fn': f(group, *args, **kwargs), 'collect_fn': g(group, outputs)}."
        )
    return DispatchMode("custom", mode["dispatch_fn"], mode["collect_fn"])


Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""One rank's positional and keyword arguments."""


def calls_of(mode: DispatchMode, group: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Return each rank's arguments. Raises DataError when the mode's lists do not have one value a rank."""
    given = mode.distribute(group, *args, **kwargs)
    # Two chunks of a TensorDict, which is a Mapping, are no such pair.
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (list, tuple))
    is_pair = is_pair and isinstance(given[1], Mapping)
    lists, named = given if is_pair else ([given], {})
    n = group.world_size
    for name, values in [*enumerate(lists), *named.items()]:
        if not hasattr(values, "__len__") or len(values) != n:
            got = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
            raise DataError(
                f"dispatch mode {mode.name}: argument {name!r} was cut into {got} for {n} workers; "
                "dispatch_fn must return one value a worker for every argument."
            )
    return [(tuple(v[rank] for v in lists), {name: v[rank] for name, v in named.items()}) for rank in range(n)]
