"""A table in a folder: columns.safetensors holds the tensors, batch.json the rest. Loading runs no code from it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.errors import DataError
from rlcore.protocol.columns import Column, DenseColumn, ObjectColumn, RaggedColumn, column_of
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.table import Table

_TENSORS, _REST = "columns.safetensors", "batch.json"
_FORMAT = 1


def save_table(table: Table, folder: Path) -> None:
    """Write a table into a new folder, completely or not at all; see DataProto.save_to_disk."""
    if folder.exists():
        raise DataError(f"{folder} exists already; choose another folder, or remove this one")
    tensors: dict[str, Tensor] = {}
    columns: list[dict[str, Any]] = []
    for number, (name, column) in enumerate(table.columns.items()):
        entry: dict[str, Any] = {"name": name, "kind": column.kind}
        value = column.view()
        if isinstance(value, Ragged):
            tensors[f"{number}.values"] = value.values
            tensors[f"{number}.offsets"] = value.offsets
        elif isinstance(value, Tensor):
            tensors[f"{number}"] = value
        else:
            entry["objects"] = value.tolist()
            for row, item in enumerate(entry["objects"]):
                _check_json(item, f"row {row} of object column {name!r}")
        columns.append(entry)
    for key, item in table.meta_info.items():
        _check_json({key: item}, f"meta_info {key!r}")
    # Written aside and renamed, as a rename is atomic: an interrupted save leaves no folder that looks complete.
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    # Clones, as columns may share storage and safetensors refuses such tensors.
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        aside / _TENSORS,
    )
    rest = {"format": _FORMAT, "columns": columns, "rows": table.rows, "meta_info": table.meta_info}
    (aside / _REST).write_text(json.dumps(rest, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    aside.rename(folder)


def load_table(folder: Path) -> Table:
    """Return the table of a folder; see DataProto.load_from_disk."""
    try:
        rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
        if rest["format"] != _FORMAT:
            raise DataError(f"{folder} holds a batch in format {rest['format']}; this version reads format {_FORMAT}")
        table = Table(meta_info=rest["meta_info"], bare_rows=rest.get("rows", 0))  # 0: older folders have no count
        for number, entry in enumerate(rest["columns"]):
            table.bind(entry["name"], _load_column(entry, number, tensors))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(
            f"{folder} was not written by save_to_disk, or is damaged ({type(error).__name__}: {error}); "
            f"it must hold {_TENSORS} and {_REST}"
        ) from error
    return table


def _load_column(entry: dict[str, Any], number: int, tensors: dict[str, Tensor]) -> Column:
    if entry["kind"] == "dense":
        return DenseColumn(tensors[f"{number}"])
    if entry["kind"] == "ragged":
        return RaggedColumn(Ragged(tensors[f"{number}.values"], tensors[f"{number}.offsets"]))
    column = column_of(entry["name"], entry["objects"])
    assert isinstance(column, ObjectColumn)
    return column


def _check_json(value: Any, where: str) -> None:
    """Raise DataError naming the value's location unless JSON preserves it: no tuples, no nan, only string keys."""
    if isinstance(value, list):
        for item in value:
            _check_json(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DataError(f"{where} has a dict with the key {key!r}; JSON allows only string keys")
            _check_json(item, where)
    elif not (
        value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    ):
        raise DataError(
            f"{where} is not a JSON value: {type(value).__name__} {value!r:.80}; allowed are None, bool, int, finite "
            "float, str, list, and dict with string keys"
        )
