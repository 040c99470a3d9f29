"""Small batches: six columns to 8 workers and back, by rlcore's groups and by plain Ray calls, on one Ray.

The plain side sends each of its actors a dict of numpy arrays, of ragged columns the values and the lengths, and joins
what they return; it is the least that a program of its own would do.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import payload
import ray
import side
import torch
from by_reference import to_tensors

from rlcore.compat import RayWorkerGroup
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import ClassWithInitArgs, Dispatch, RayResourcePool, Worker, register

WORKERS = 8

Arrays = dict[str, tuple[np.ndarray, np.ndarray | None]]


class Echo(Worker):
    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        gives=lambda batch: {name: column.spec() for name, column in batch.table.columns.items()},
    )
    def echo(self, batch: DataProto) -> DataProto:
        """Return every column, plus one."""
        out = DataProto()
        for name in list(batch.keys()):
            value = batch.view(name)
            out[name] = value.map(lambda v: v + 1) if isinstance(value, Ragged) else value + 1
        return out

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...


class PlainEcho:
    def echo(self, columns: Arrays) -> Arrays:
        """Return every column, plus one."""
        return {name: (values + 1, lengths) for name, (values, lengths) in columns.items()}

    def nothing(self) -> None: ...


def cut(columns: Arrays, parts: int) -> list[Arrays]:
    """Return the columns cut by rows into equal parts."""
    made: list[Arrays] = [{} for _ in range(parts)]
    for name, (values, lengths) in columns.items():
        rows = len(values if lengths is None else lengths)
        ends = None if lengths is None else np.concatenate([[0], lengths.cumsum()])
        for part, out in enumerate(made):
            start, end = rows * part // parts, rows * (part + 1) // parts
            if lengths is None:
                out[name] = values[start:end], None
            else:
                out[name] = values[ends[start] : ends[end]], lengths[start:end]
    return made


def join(parts: list[Arrays]) -> Arrays:
    """Return the parts laid end to end."""
    return {
        name: (
            np.concatenate([part[name][0] for part in parts]),
            None if lengths is None else np.concatenate([part[name][1] for part in parts]),
        )
        for name, (_, lengths) in parts[0].items()
    }


def main() -> None:
    """Serve `call`."""
    side.start_ray()
    group = RayWorkerGroup(RayResourcePool([WORKERS]), ClassWithInitArgs(Echo), name="echo")
    actors = [ray.remote(PlainEcho).options(num_cpus=0).remote() for _ in range(WORKERS)]
    columns = payload.small_rows()
    batch = DataProto.from_dict(to_tensors(columns))

    def by_rlcore() -> dict[str, Any]:
        out = group.echo(batch)
        return {name: out.view(name) for name in list(out.keys())}

    def plainly() -> Arrays:
        parts = cut(columns, WORKERS)
        return join(ray.get([actor.echo.remote(part) for actor, part in zip(actors, parts, strict=True)]))

    def empty_by_rlcore() -> None:
        group.nothing()

    def empty_plainly() -> None:
        ray.get([actor.nothing.remote() for actor in actors])

    for name, got in by_rlcore().items():  # both give the same, or the times mean nothing
        values = got.values if isinstance(got, Ragged) else got
        assert torch.equal(values, torch.from_numpy(plainly()[name][0])), name

    def call(rounds: int) -> dict[str, list[float]]:
        ways = {"rlcore": by_rlcore, "plain": plainly, "rlcore_empty": empty_by_rlcore, "plain_empty": empty_plainly}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
        return times

    side.serve({"call": call})


if __name__ == "__main__":
    main()
