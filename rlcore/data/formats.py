"""Rows of one file: JSON Lines, JSON, Parquet or Arrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.keys import nearest, value_at
from rlcore.errors import ConfigError, DataError

FORMATS = (".jsonl", ".json", ".parquet", ".arrow")
TEXT = "utf-8-sig"  # with or without a byte order mark

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a .jsonl, .json, .parquet or .arrow file; DataError names file and line."""
    if path.suffix not in FORMATS:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without an ending'}; allowed: {', '.join(FORMATS)}. "
            f"{remedy(path)}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; it must hold at least one row")
    read = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".arrow": _read_arrow}
    rows = read[path.suffix](path)
    if not rows:
        raise DataError(f"{path} holds no rows; it must hold at least one")
    return rows


def remedy(path: Path) -> str:
    """Return how to make a readable file of one that is in another format."""
    if path.suffix in (".csv", ".tsv"):
        read = f"pandas.read_csv('{path.name}'" + ("" if path.suffix == ".csv" else r", sep='\t'")
        return f"Convert it in Python: {read}).to_json('{path.stem}.jsonl', orient='records', lines=True)"
    if path.suffix in (".gz", ".zst", ".zip", ".bz2", ".xz"):
        return "Unpack it first"
    return "Write one JSON object a line into a .jsonl file"


def require_column(rows: Sequence[Mapping[str, Any]], column: str, path: Path, key: str) -> None:
    """Raise DataError when a row has no value in `column`, which may be a path; the config key `key` chose it."""
    for number, row in enumerate(rows, start=1):
        if value_at(row, column) is None:
            raise DataError(
                f"{path}, row {number}: nothing in column {column!r}; its columns are {', '.join(row) or 'none'}. "
                f"Set {key} to the right one.{nearest(row, column)}"
            )


def dataset_class() -> Any:
    """Return `datasets.Dataset`; ConfigError when that library is not installed."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise ConfigError(f"this data needs Hugging Face datasets ({error}): pip install datasets") from error
    return Dataset


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; DataError names line and column."""
    try:
        return json.loads(path.read_text(encoding=TEXT))
    except json.JSONDecodeError as error:
        hint = " It looks like JSON Lines: name it .jsonl." if error.msg == "Extra data" else ""
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}.{hint}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it, for example with iconv") from error


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding=TEXT) as lines:
        for number, line in enumerate(_decoded(lines, path), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}, column {error.colno}: not valid JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: each line must be a JSON object, got {_kind(row)}")
            rows.append(row)
    return rows


def _decoded(lines: Any, path: Path) -> Any:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it, for example with iconv") from error


def _read_json(path: Path) -> list[Row]:
    rows = read_json(path)
    if not isinstance(rows, list):
        raise DataError(f"{path}: a .json file must hold a list of objects, got {_kind(rows)}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: each row must be a JSON object, got {_kind(row)}")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    from_table = dataset_class()
    import pyarrow  # type: ignore[import-untyped]  # comes with datasets
    from pyarrow import parquet  # type: ignore[import-untyped]

    try:
        # Read here, since `datasets` itself would leave a converted copy in the user's cache folder.
        rows: list[Row] = from_table(parquet.ParquetFile(path).read()).to_list()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return rows


def _read_arrow(path: Path) -> list[Row]:
    from_table = dataset_class()
    import pyarrow

    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"  # the other form, a stream, is that of save_to_disk
    try:
        with pyarrow.memory_map(str(path)) as source:
            opened = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            rows: list[Row] = from_table(opened.read_all()).to_list()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Arrow file: {error}") from error
    return rows


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
