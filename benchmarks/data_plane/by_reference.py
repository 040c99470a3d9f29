"""rlcore's way: the producers' columns stay where they were made, and each consumer fetches its rows of them.

python by_reference.py MEGABYTES
"""

from __future__ import annotations

import sys
from typing import Any

import payload
import side
import torch

from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import Form
from rlcore.workers import ClassWithInitArgs, Dispatch, RayResourcePool, RayWorkerGroup, Worker, register

PRODUCERS = 4
MICRO_BATCH = 64
"""Rows that a consumer takes at a time, as a training engine does."""
PER_ROW = {"features": (payload.DENSE_WIDTH,), "scores": (), "sample_index": ()}
TOKENS = ("prompts", "responses")
GIVES = {
    **{name: Form("ragged", torch.int64, (), "cpu") for name in TOKENS},
    **{name: Form("ragged", torch.float32, (), "cpu") for name in payload.PER_TOKEN},
    **{n: Form("dense", torch.int64 if n == "sample_index" else torch.float32, s, "cpu") for n, s in PER_ROW.items()},
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
    def __init__(self) -> None:
        self._passed = side.Bytes()
        self._before = 0

    @register(Dispatch.DP_COMPUTE_METRIC, reads=tuple(GIVES))
    def consume(self, batch: DataProto) -> tuple[float, int, int]:
        """Return the sum of all values, the bytes that came into this process for it, and the bytes that it used."""
        summed, used = 0.0, 0
        for rows in batch.split(MICRO_BATCH, uneven=True):
            for name in GIVES:
                column = rows.view(name)
                values = column.values if isinstance(column, Ragged) else column
                summed += float(values.sum())
                used += values.nbytes
        came = self._passed.received - self._before
        self._before = self._passed.received
        return summed, came, used


def main(megabytes: float) -> None:
    """Serve `move`."""
    side.start_ray()
    made = ClassWithInitArgs(Producer, megabytes)
    producers = RayWorkerGroup(RayResourcePool([PRODUCERS]), made, name="producer")
    consumers: dict[int, RayWorkerGroup] = {}
    passed = side.Bytes()

    def move(count: int) -> dict[str, Any]:
        sums = consumers[count].consume(producers.produce())
        summed, came, used = (sum(values) for values in zip(*sums, strict=True))
        return {"sum": summed, "pulled": came, "used": used}

    def answer(count: int, watch: bool) -> dict[str, Any]:
        if count not in consumers:
            pool = RayResourcePool([count])
            consumers[count] = RayWorkerGroup(pool, ClassWithInitArgs(Consumer), name=f"consumer-of-{count}")
        return side.measured(lambda: move(count), passed, watch)

    side.serve({"move": lambda consumers, watch=False: answer(consumers, watch)})


if __name__ == "__main__":
    main(float(sys.argv[1]))
