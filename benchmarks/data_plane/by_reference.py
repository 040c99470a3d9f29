"""rlcore's way: the producers' columns stay where they were made, and each consumer fetches its rows of them.

python by_reference.py MEGABYTES
"""

from __future__ import annotations

import sys
from typing import Any

import payload
import side
import torch

from rlcore.compat import RayWorkerGroup
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import ColumnSpec
from rlcore.protocol.remote import RemoteColumn
from rlcore.workers import ClassWithInitArgs, Dispatch, RayResourcePool, Worker, register

PRODUCERS = 4
MICRO_BATCH = 64
"""Rows that a consumer takes at a time, as a training engine does."""
PER_ROW = {"features": (payload.DENSE_WIDTH,), "scores": (), "sample_index": ()}
TOKENS = ("prompts", "responses")
GIVES = {
    **{name: ColumnSpec("ragged", torch.int64, (), "cpu") for name in TOKENS},
    **{name: ColumnSpec("ragged", torch.float32, (), "cpu") for name in payload.PER_TOKEN},
    **{
        n: ColumnSpec("dense", torch.int64 if n == "sample_index" else torch.float32, s, "cpu")
        for n, s in PER_ROW.items()
    },
}


def to_tensors(columns: dict[str, payload.Column]) -> dict[str, torch.Tensor | Ragged]:
    """Return the columns as tensors and Raggeds."""
    return {
        name: torch.from_numpy(values)
        if lengths is None
        else Ragged.from_lengths(torch.from_numpy(values), torch.from_numpy(lengths))
        for name, (values, lengths) in columns.items()
    }


class Producer(Worker):
    def __init__(self, megabytes: float) -> None:
        self._batch = DataProto.from_dict(to_tensors(payload.rows_of(self.rank, PRODUCERS, megabytes)))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives=GIVES, rows=lambda: payload.ROWS // PRODUCERS)
    def produce(self) -> DataProto:
        return self._batch


class Consumer(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def forget(self) -> None:
        side.forget_touches()

    @register(Dispatch.ONE_TO_ALL)
    def touched(self) -> int:
        return side.touched_bytes()

    @register(Dispatch.DP_COMPUTE_METRIC, reads=tuple(GIVES))
    def consume(self, batch: DataProto) -> tuple[float, int, int]:
        """Return the sum of all values, the bytes of the blocks that it fetched, and the bytes that it used."""
        summed, used = 0.0, 0
        for rows in batch.split(MICRO_BATCH, uneven=True):
            for name in GIVES:
                column = rows.view(name)
                values = column.values if isinstance(column, Ragged) else column
                summed += float(values.sum())
                used += values.nbytes
        columns = [column for column in batch.table.columns.values() if isinstance(column, RemoteColumn)]
        return summed, sum(column.nbytes for column in columns), used


def main(megabytes: float) -> None:
    """Serve `move`."""
    side.start_ray()
    made = ClassWithInitArgs(Producer, megabytes)
    producers = RayWorkerGroup(RayResourcePool([PRODUCERS]), made, name="producer")
    consumers: dict[int, RayWorkerGroup] = {}
    passed = side.Bytes()

    def move(count: int) -> dict[str, Any]:
        sums = consumers[count].consume(producers.produce())
        summed, pulled, used = zip(*sums, strict=True)
        return {"sum": sum(summed), "pulled": max(came / needed for came, needed in zip(pulled, used, strict=True))}

    def answer(count: int, watch: bool) -> dict[str, Any]:
        if count not in consumers:
            pool = RayResourcePool([count])
            consumers[count] = RayWorkerGroup(pool, ClassWithInitArgs(Consumer), name=f"consumer-of-{count}")
        if not watch:
            return side.measured(lambda: move(count), passed, watch=False)
        consumers[count].forget()
        answer = side.measured(lambda: move(count), passed, watch=True)
        return answer | {"touched": max(consumers[count].touched()) * count / (megabytes * 2**20)}

    side.serve({"move": lambda consumers, watch=False: answer(consumers, watch)})


if __name__ == "__main__":
    main(float(sys.argv[1]))
