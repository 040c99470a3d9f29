"""Dispatch modes: how a group splits a call's arguments for its ranks and joins their results.

A mode is two functions. `distribute(group, *args, **kwargs)` returns, for every argument, a list with one value per
rank. `collect(group, outputs)` turns the list of all ranks' results (None for a rank that was not called) into the
call's result. Both find the ranks' mesh coordinates in `group.mesh`. (HybridFlow, arXiv 2409.19256, Table 3.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch

from rlcore.errors import ConfigError, DataError, did_you_mean
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.balance import SplitBatch
from rlcore.workers.contract import CallArgs

METRICS = "metrics"
"""The key of meta_info under which ranks return numbers of their own."""
PerRank: TypeAlias = tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]
"""For every positional and every keyword argument, a list with one value per rank."""


class CustomDispatch(TypedDict):
    """A user's own mode: a pair of functions that take the group first."""

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[[Any, list[Any]], Any]


@dataclass(frozen=True)
class DispatchMode:
    """A mode's two functions. `joins_rows`: its result is a DataProto. `only_rank_zero`: only rank 0 is called."""

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
    """Take every argument as a list with one value per rank. Raises DataError for a list of another length."""
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
    """Return `value` split into `parts`: DataProtos by rows, also inside lists, tuples and dicts; others unsplit.

    Row counts differ by at most one, larger ones first; with fewer rows than parts the last parts have no rows.
    A SplitBatch is split already; raises DataError when it has another number of parts.
    """
    if isinstance(value, SplitBatch):
        if len(value.parts) != parts:
            raise DataError(
                f"a batch that was split into {len(value.parts)} parts is to be split into {parts}; pass it unsplit"
            )
        return list(value.parts)
    if isinstance(value, DataProto):
        small, larger = divmod(len(value), parts)
        # The first `larger` parts have one row more.
        ends = [part * small + min(part, larger) for part in range(parts + 1)]
        return [value.select_idxs(slice(start, end)) for start, end in itertools.pairwise(ends)]
    if not _holds_rows(value):
        return [value] * parts
    split = [split_rows(item, parts) for item in (value.values() if type(value) is dict else value)]
    by_part = zip(*split, strict=True)
    if type(value) is dict:
        return [dict(zip(value, items, strict=True)) for items in by_part]
    return [type(value)(items) for items in by_part]


def _holds_rows(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(_holds_rows(item) for item in value)
    if type(value) is dict:
        return any(_holds_rows(item) for item in value.values())
    return isinstance(value, (DataProto, SplitBatch))


def _refuse_unsplit_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise DataError for rows that are in no DataProto: each rank would get all of them, and give all back.

    A list beside a DataProto is taken for a setting.
    """
    named = [*enumerate(args), *kwargs.items()]
    alone = not any(_holds_rows(value) for _, value in named)
    for name, value in named:
        is_tensor = isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0
        is_tensor_dict = isinstance(value, Mapping) and hasattr(value, "batch_size")
        is_rows = is_tensor or is_tensor_dict or isinstance(value, Ragged)
        if is_rows or (alone and isinstance(value, (list, tuple)) and len(value) and not _holds_rows(value)):
            raise DataError(
                f"argument {name!r} is a {type(value).__name__} of {len(value)} entries, which this dispatch mode "
                "would give whole to every rank: it splits the rows of a DataProto. Put them into one, as "
                "DataProto.from_single_dict({'x': rows}); a value that every rank needs goes into a dict, or to a "
                "method with Dispatch.ONE_TO_ALL"
            )


def join_rows(outputs: Sequence[Any]) -> Any:
    """Return the results joined by rows: DataProtos, Ragged columns, tensors or lists; None if all are None.

    Of DataProtos, `metrics` in meta_info becomes the list of all ranks' values; any other key must be equal on all
    ranks that have it. A DataProto without rows adds only its meta_info, even if its columns differ. Raises DataError
    for meta_info that differs, and for other or mixed types.
    """
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, DataProto) for output in outputs):
        # A rank without rows may not know its columns' dtypes.
        with_rows = [output for output in outputs if len(output)]
        metas = [output.meta_info for output in outputs]
        cls = type(outputs[0])
        if not any(metas):
            return cls.concat(with_rows) if with_rows else outputs[0]
        plain = [DataProto(meta_info={key: value for key, value in meta.items() if key != METRICS}) for meta in metas]
        rows = [output.select(meta_info_keys=[]) for output in with_rows or outputs[:1]]
        joined = cls.concat([*rows, *plain])
        if any(METRICS in meta for meta in metas):
            joined.meta_info[METRICS] = [meta[METRICS] for meta in metas if METRICS in meta]
        return joined
    if all(isinstance(output, Ragged) for output in outputs):
        return Ragged.cat(list(outputs))
    if all(isinstance(output, torch.Tensor) and output.ndim for output in outputs):
        return torch.cat(list(outputs))
    if all(type(output) is list for output in outputs):
        return list(itertools.chain.from_iterable(outputs))
    kinds = sorted({type(output).__name__ for output in outputs})
    raise DataError(
        f"results of type {', '.join(kinds)} cannot be joined by rows; return a DataProto (or a tensor or list with "
        "one entry per row) on every rank, or register the method with another dispatch mode."
    )


def split_over(*axes: str) -> Callable[..., PerRank]:
    """Return the function that splits rows over the positions along `axes`; ranks at one position get the same object.

    Rows are split over the first axis, and each part over the next. So the generating replicas of a training replica
    together get the rows that a mode over dp gives the training replica.
    """

    def distribute(group: Any, *args: Any, **kwargs: Any) -> PerRank:
        numbers, _ = group.mesh.slices(axes)
        _refuse_unsplit_rows(args, kwargs)

        def per_rank(value: Any) -> list[Any]:
            parts = [value]
            # Axis by axis, not into one product of sizes: nested cuts keep a training replica's rows on its own ranks.
            for axis in axes:
                pieces = [split_rows(part, group.mesh.size(axis)) for part in parts]
                parts = list(itertools.chain.from_iterable(pieces))
            return [parts[number] for number in numbers]

        return [per_rank(value) for value in args], {name: per_rank(value) for name, value in kwargs.items()}

    return distribute


def join_from(*axes: str, **collected_at: int) -> Callable[[Any, list[Any]], Any]:
    """Return the function that joins one rank's result from each position along `axes` (see Mesh.sources)."""

    def collect(group: Any, outputs: list[Any]) -> Any:
        return join_rows([outputs[rank] for rank in group.mesh.sources(axes, collected_at)])

    return collect


def rows_over(name: str, *axes: str, **collected_at: int) -> DispatchMode:
    """Return the mode that splits rows over the positions along `axes` and joins one rank's result from each.

    All ranks at a position get its rows. The result is that of the lowest rank there whose other coordinates are
    `collected_at` (-1: the last along that axis).
    """
    return DispatchMode(name, split_over(*axes), join_from(*axes, **collected_at), joins_rows=True)


def per_dp_rank(group: Any, *args: Any, **kwargs: Any) -> PerRank:
    """Take every argument as a list with one value per data-parallel rank. DataError for a list of another length."""
    numbers, count = group.mesh.slices(["dp"])
    for name, value in [*enumerate(args), *kwargs.items()]:
        _check_list("DP_COMPUTE", name, value, count, "data-parallel ranks")

    def per_rank(value: Sequence[Any]) -> list[Any]:
        return [value[number] for number in numbers]

    return [per_rank(value) for value in args], {name: per_rank(value) for name, value in kwargs.items()}


def each_dp_rank(group: Any, outputs: list[Any]) -> list[Any]:
    """Return one result per data-parallel rank: that of its lowest rank."""
    return [outputs[rank] for rank in group.mesh.sources(["dp"], {})]


def with_function(group: Any, *args: Any, **kwargs: Any) -> PerRank:
    """Give every rank the first argument, a function, and split the others' rows. DataError without a function."""
    if not args or not callable(args[0]):
        got = f"{type(args[0]).__name__} {args[0]!r:.80}" if args else "none"
        raise DataError(
            f"DP_COMPUTE_PROTO_WITH_FUNC: the first positional argument must be a function, got {got}; pass the "
            "function first, or use Dispatch.DP_COMPUTE_PROTO."
        )
    lists, named = split_over("dp")(group, *args[1:], **kwargs)
    return [[args[0]] * group.world_size, *lists], named


class Dispatch(Enum):
    """The modes that `register` knows by name. Coordinates are those that the workers gave to `set_mesh`."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", broadcast, gather)
    """Every rank gets the same arguments; returns the list of all results."""
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", per_worker, gather)
    """Every argument is a list with one value per rank; returns the list of all results."""
    RANK_ZERO = DispatchMode("RANK_ZERO", broadcast, first, only_rank_zero=True)
    """Only rank 0 is called; returns its result."""
    PROTO_3D = rows_over("PROTO_3D", "dp", pp=-1, tp=0)
    """Splits rows over dp, the same for all pp and tp; joins the results of the last stage's tp=0 (paper: 3D_PROTO)."""
    ALL_MICRO_DP_3D = rows_over("ALL_MICRO_DP_3D", "dp", "micro_dp")
    """Splits rows over dp and micro_dp, one slice per generating replica; joins the results of each one's lowest rank.

    (Paper: 3D_ALL_MICRO_DP. Its "micro-DP group" must be read as the ranks that hold one generating replica.)
    """
    PP_ONLY_3D = DispatchMode("PP_ONLY_3D", broadcast, join_from("pp", tp=0, dp=0))
    """Every rank gets the same arguments; joins the results of tp=0, dp=0 of every stage (paper: 3D_PP_ONLY)."""
    DP_COMPUTE = DispatchMode("DP_COMPUTE", per_dp_rank, each_dp_rank)
    """Every argument is a list with one value per data-parallel rank; returns the list of their results."""
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", split_over("dp"), each_dp_rank)
    """Splits rows over the data-parallel ranks; returns the list of their results, not joined."""
    DP_COMPUTE_PROTO = rows_over("DP_COMPUTE_PROTO", "dp")
    """Splits rows over the data-parallel ranks, calls all of them, even with no rows, and joins their results.

    (Paper: DP_PROTO.)
    """
    ALL_RANKS_PROTO = rows_over("ALL_RANKS_PROTO", "dp", "pp", "tp")
    """Splits rows over all ranks of all stages and tensor shards; joins all results."""
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", with_function, join_from("dp"), joins_rows=True
    )
    """As DP_COMPUTE_PROTO; the first argument is a function, and all ranks get it."""

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
        """Pickle by name: the mode's functions are closures, which pickle refuses."""
        return getattr, (Dispatch, self.name)


PAPER_NAMES = {
    "ONE_TO_ALL": "ONE_TO_ALL",
    "3D_PROTO": "PROTO_3D",
    "3D_ALL_MICRO_DP": "ALL_MICRO_DP_3D",
    "3D_PP_ONLY": "PP_ONLY_3D",
    "DP_PROTO": "DP_COMPUTE_PROTO",
    "ALL_TO_ALL": "ALL_TO_ALL",
}
"""The transfer protocols of HybridFlow's Table 3, and the names of the corresponding modes."""


class Execute(Enum):
    """The ranks that run a method; `RANK_ZERO` calls only rank 0 and returns its result uncollected."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


def as_mode(mode: Dispatch | CustomDispatch) -> Dispatch | DispatchMode:
    """Return a named mode, or a user's pair of functions as a mode. Raises ConfigError for any other value."""
    if isinstance(mode, Dispatch):
        return mode
    is_pair = isinstance(mode, dict) and set(mode) == {"dispatch_fn", "collect_fn"}
    if not is_pair or not all(callable(function) for function in mode.values()):
        raise ConfigError(
            f"dispatch_mode={mode!r} must be one of {[known.name for known in Dispatch]}, or a dict of two functions, "
            "{'dispatch_fn': f(group, *args, **kwargs), 'collect_fn': g(group, outputs)}."
        )
    return DispatchMode("custom", mode["dispatch_fn"], mode["collect_fn"])


def calls_of(mode: DispatchMode, group: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[CallArgs]:
    """Return each rank's arguments. Raises DataError when the mode returns a list without one value per rank."""
    given = mode.distribute(group, *args, **kwargs)
    # A tuple of two TensorDict chunks is not such a pair, although a TensorDict is a Mapping.
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (list, tuple))
    is_pair = is_pair and isinstance(given[1], Mapping)
    lists, named = given if is_pair else ([given], {})
    n = group.world_size
    for name, values in [*enumerate(lists), *named.items()]:
        if not hasattr(values, "__len__") or len(values) != n:
            got = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
            raise DataError(
                f"dispatch mode {mode.name}: argument {name!r} was split into {got} for {n} workers; "
                "dispatch_fn must return one value per worker for every argument."
            )
    calls: list[CallArgs] = []
    for rank in range(n):
        args_of_rank = tuple(values[rank] for values in lists)
        calls.append((args_of_rank, {name: values[rank] for name, values in named.items()}))
    return calls
