"""The plain way, as it is best written: actors give TensorDicts, the controller joins, cuts and sends them out again.

    python plain_ray.py LAYOUT COPYING MEGABYTES

LAYOUT: `jagged` (nested tensors, no padding) or `padded`. COPYING: `default` (a tensor is pickled as torch does it),
or `zero_copy` (Ray's own out-of-band pickling of tensors, RAY_ENABLE_ZERO_COPY_TORCH_TENSORS).
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import payload
import ray
import side
import torch
from tensordict import TensorDict

PRODUCERS = 4


def to_tensor(values: Any, lengths: Any, layout: str) -> torch.Tensor:
    """Return a column: dense ones as they are, ragged ones jagged or padded to the longest allowed."""
    tensor = torch.from_numpy(values)
    if lengths is None:
        return tensor
    lengths = torch.from_numpy(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if layout == "jagged":
        return torch.nested.nested_tensor_from_jagged(tensor, offsets)
    width = 256 if int(lengths.max()) <= 256 else payload.LONGEST
    padded = tensor.new_zeros(len(lengths), width)
    padded[torch.arange(width) < lengths[:, None]] = tensor
    return padded


def total(batch: TensorDict) -> float:
    """Return the sum of everything: a touch of each value."""
    return sum(float((tensor.values() if tensor.is_nested else tensor).sum()) for tensor in batch.values())


class Producer:
    def __init__(self, number: int, layout: str, megabytes: float) -> None:
        warnings.simplefilter("ignore")
        columns = payload.rows_of(number, PRODUCERS, megabytes)
        tensors = {name: to_tensor(*column, layout) for name, column in columns.items()}
        self._batch = TensorDict(tensors, len(tensors["scores"]))

    def produce(self) -> TensorDict:
        return self._batch


class Consumer:
    def __init__(self) -> None:
        warnings.simplefilter("ignore")
        self._passed = side.Bytes()
        self._before = 0

    def consume(self, batch: TensorDict) -> tuple[float, int]:
        """Return the sum of all values, and the bytes that came into this process for it."""
        summed = total(batch)
        came = self._passed.received - self._before
        self._before = self._passed.received
        return summed, came


def main(layout: str, copying: str, megabytes: float) -> None:
    """Serve `move`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    side.start_ray(**({"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"} if copying == "zero_copy" else {}))
    producers = [ray.remote(Producer).remote(number, layout, megabytes) for number in range(PRODUCERS)]
    consumers: list[Any] = []
    passed = side.Bytes()

    def move(consumers_wanted: int) -> dict[str, Any]:
        while len(consumers) < consumers_wanted:
            consumers.append(ray.remote(Consumer).remote())
        batch = TensorDict.cat(ray.get([producer.produce.remote() for producer in producers]))
        chunks = batch.chunk(consumers_wanted)
        if copying == "default" or layout == "jagged":  # else each chunk, a view, is pickled with all of its storage
            chunks = [chunk.clone() for chunk in chunks]
        sums = ray.get([consumer.consume.remote(chunk) for consumer, chunk in zip(consumers, chunks, strict=False)])
        return {"sum": sum(summed for summed, _ in sums), "pulled": sum(came for _, came in sums) / (megabytes * 2**20)}

    side.serve({"move": lambda consumers, watch=False: side.measured(lambda: move(consumers), passed, watch)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
