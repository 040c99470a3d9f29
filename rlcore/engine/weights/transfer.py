"""Packs full parameters into a batch, one row each, so that they travel between processes like any other column."""

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

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each parameter by its Hugging Face name."""


def packed_specs(names: DataProto, dtype: torch.dtype) -> dict[str, ColumnSpec]:
    """Return the columns of `pack_weights`, and `checksum`: of the trained weights in `dtype`, or None."""
    return {
        "checksum": ColumnSpec.objects(),
        "name": ColumnSpec.objects(),
        "shape": ColumnSpec.objects(),
        "values": ColumnSpec.ragged(dtype),
        "version": ColumnSpec.dense(torch.int64),
    }


def pack_weights(
    names: Sequence[str], weights: Iterable[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype, version: int
) -> DataProto:
    """Return one row for each of `names`: `name` and `shape` (objects), `values` (ragged `dtype`), `version` (int64).

    Iterates over all of `weights`, because gathering them is collective. A tensor of `weights` may be valid only until
    the next one. Raises DataError when they differ from `shapes`.
    """
    lengths = torch.tensor([math.prod(shapes[name]) for name in names], dtype=torch.int64)
    values = Ragged.from_lengths(torch.empty(int(lengths.sum()), dtype=dtype), lengths)
    row = {name: number for number, name in enumerate(names)}
    for name, tensor in checked(weights, shapes):
        # Names of other ranks' rows are skipped, but every tensor is drawn: the export is a collective.
        if name in row:
            values[row[name]].copy_(tensor.detach().reshape(-1))
    return DataProto.from_single_dict(
        {
            "name": object_column(names),
            "shape": object_column([shapes[name] for name in names]),
            "values": values,
            "version": torch.full((len(names),), version, dtype=torch.int64),
        }
    )


def object_column(entries: Sequence[Any]) -> np.ndarray:
    """Return entries of any type as a one-dimensional object array."""
    column = np.empty(len(entries), dtype=object)
    column[:] = entries
    return column


class RemoteWeights(Mapping[str, Tensor]):
    """The parameters of `pack_weights` by name. Reading one fetches its block and no other.

    `shapes` are known without fetching. `version` is that of the train engine that exported them. `trained`: its
    fingerprint; empty if they came without checksums.
    """

    def __init__(self, batch: DataProto) -> None:
        self._batch = batch
        names = batch.view("name").tolist()
        self._row = {name: row for row, name in enumerate(names)}
        self.shapes: Shapes = dict(zip(names, batch.view("shape").tolist(), strict=True))
        self.version = int(batch.view("version")[0])
        checksums = batch.view("checksum") if "checksum" in batch else [None] * len(names)
        self.trained = {name: each for name, each in zip(names, checksums, strict=True) if each is not None}

    def __getitem__(self, name: str) -> Tensor:
        row = self._row[name]
        values: Ragged = self._batch[row : row + 1].view("values")
        return values.values.view(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def check_same_parameters(own: Shapes, given: Shapes) -> None:
    """Raise DataError naming the parameters of `given` that are missing, unknown or of another shape than `own`."""
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
        raise DataError(f"these weights belong to another model: {'; '.join(wrong[:5])}{more}")


def checked(weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights. Raises DataError for an unexpected shape, a duplicate, and at the end for a missing one."""
    seen = set()
    for name, tensor in weights:
        if name in seen or shapes.get(name) != tuple(tensor.shape):
            raise DataError(f"weight {name} has the unexpected shape {list(tensor.shape)}, or is a duplicate")
        seen.add(name)
        yield name, tensor
    if missing := [name for name in shapes if name not in seen]:
        raise DataError(f"weights are missing: {', '.join(missing[:5])}")
