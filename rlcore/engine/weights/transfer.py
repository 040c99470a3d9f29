"""Whole parameters on their way from one role's processes to another's: a batch with one row a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.columns import ColumnSpec
from rlcore.workers import WorkerGroup

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each parameter by its Hugging Face name."""


class Sender:
    """Sends whole parameters of a role's ModelWorkers in one `dtype`; the controller gets references, and never waits.

    Rank r packs the r-th part of them.
    """

    def __init__(self, group: WorkerGroup, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._names: DataProto | None = None

    def send(self) -> DataProto:
        """Return the weights as all earlier calls leave them, in the columns of `pack`. Asks for the names once."""
        if self._names is None:
            self._names = DataProto.from_single_dict({"name": _objects(self._group.parameter_names())})
        return self._group.send_weights(self._names, self._dtype)


def packed_specs(names: DataProto, dtype: torch.dtype) -> dict[str, ColumnSpec]:
    """Return the columns that `pack` gives."""
    return {
        "name": ColumnSpec.objects(),
        "shape": ColumnSpec.objects(),
        "values": ColumnSpec.ragged(dtype),
        "version": ColumnSpec.dense(torch.int64),
    }


def pack(
    names: Sequence[str], weights: Iterable[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype, version: int
) -> DataProto:
    """Return the parameters called `names`, a row each: `name` and `shape` (objects), `values` (ragged), `version`.

    All of `weights`, which gathers them, is gone through, and has to be what `shapes` says (else DataError); what it
    yields need be valid only until the next. As rows of a batch the parameters are cut into blocks and travel by
    reference like any other column.
    """
    lengths = torch.tensor([math.prod(shapes[name]) for name in names], dtype=torch.int64)
    values = Ragged.from_lengths(torch.empty(int(lengths.sum()), dtype=dtype), lengths)
    row = {name: number for number, name in enumerate(names)}
    for name, tensor in as_announced(weights, shapes):
        if name in row:
            values[row[name]].copy_(tensor.detach().reshape(-1))
    return DataProto.from_single_dict(
        {
            "name": _objects(names),
            "shape": _objects([shapes[name] for name in names]),
            "values": values,
            "version": torch.full((len(names),), version, dtype=torch.int64),
        }
    )


def _objects(entries: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(entries), dtype=object)
    column[:] = entries
    return column


class Weights(Mapping[str, Tensor]):
    """What `pack` made, by parameter name. Reading a parameter brings its block here, and no other.

    `shapes` are known without that; `version` is that of the train engine that they are from.
    """

    def __init__(self, batch: DataProto) -> None:
        self._batch = batch
        names = batch.view("name").tolist()
        self._row = {name: row for row, name in enumerate(names)}
        self.shapes: Shapes = dict(zip(names, batch.view("shape").tolist(), strict=True))
        self.version = int(batch.view("version")[0])

    def __getitem__(self, name: str) -> Tensor:
        row = self._row[name]
        values: Ragged = self._batch[row : row + 1].view("values")
        return values.values.view(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def check_fit(own: Shapes, given: Shapes) -> None:
    """Raise DataError naming the parameters that are missing, unknown or of another shape than one's own."""
    wrong = [
        *(f"{name} is missing" for name in own if name not in given),
        *(f"{name} is unknown" for name in given if name not in own),
        *(
            f"{name} has shape {list(given[name])}, not {list(shape)}"
            for name, shape in own.items()
            if name in given and given[name] != shape
        ),
    ]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DataError(
            f"weights can be taken over from the same model only; these are of another: {'; '.join(wrong[:5])}{more}"
        )


def as_announced(weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights while they are those of `shapes`, each once; raise DataError where they are not."""
    seen = set()
    for name, tensor in weights:
        if name in seen or shapes.get(name) != tuple(tensor.shape):
            raise DataError(f"weight {name} {list(tensor.shape)} was not announced so, or comes for the second time")
        seen.add(name)
        yield name, tensor
    if missing := [name for name in shapes if name not in seen]:
        raise DataError(f"weights {', '.join(missing[:5])} were announced and did not come")
