"""verl's way: its worker groups, its DataProto and its dispatch decorator, on its Ray single controller.

    python verl_path.py LAYOUT PICKLING MEGABYTES

LAYOUT: `padded` (what its trainer sends) or `jagged`. PICKLING: `default` (torch.save of a consolidated TensorDict), or
`numpy` (VERL_DATAPROTO_SERIALIZATION_METHOD=numpy). Runs in a venv with verl's wheel.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import payload
import plain_ray
import ray
import side
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

PRODUCERS = 4


class Producer(Worker):
    def __init__(self, layout: str, megabytes: float) -> None:
        super().__init__()
        warnings.simplefilter("ignore")
        columns = payload.rows_of(self.rank, PRODUCERS, megabytes)
        tensors = {name: plain_ray.to_tensor(*column, layout) for name, column in columns.items()}
        self._batch = DataProto.from_dict(tensors=tensors)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def produce(self) -> DataProto:
        return self._batch


class Consumer(Worker):
    def __init__(self) -> None:
        super().__init__()
        warnings.simplefilter("ignore")
        self._passed = side.Bytes()
        self._before = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def consume(self, batch: DataProto) -> tuple[float, int]:
        summed = plain_ray.total(batch.batch)
        came = self._passed.received - self._before
        self._before = self._passed.received
        return summed, came


def group_of(cls: type[Worker], workers: int, *args: Any) -> RayWorkerGroup:
    """Return a group of verl's with a process a worker, on the CPU."""
    made = RayClassWithInitArgs(ray.remote(cls), *args)
    pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, made, device_name="cpu")


def main(layout: str, pickling: str, megabytes: float) -> None:
    """Serve `move`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    side.start_ray(**({"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"} if pickling == "numpy" else {}))
    producers = group_of(Producer, PRODUCERS, layout, megabytes)
    consumers: dict[int, RayWorkerGroup] = {}
    passed = side.Bytes()

    def move(count: int) -> dict[str, Any]:
        sums = consumers[count].consume(producers.produce())
        return {"sum": sum(summed for summed, _ in sums), "pulled": sum(came for _, came in sums) / (megabytes * 2**20)}

    def answer(consumers_wanted: int, watch: bool) -> dict[str, Any]:
        if consumers_wanted not in consumers:
            consumers[consumers_wanted] = group_of(Consumer, consumers_wanted)
        return side.measured(lambda: move(consumers_wanted), passed, watch)

    side.serve({"move": lambda consumers, watch=False: answer(consumers, watch)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
