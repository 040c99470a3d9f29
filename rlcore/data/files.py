"""Rows from local JSON Lines, JSON and Parquet files, and the data set `file`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.schema import DataConfig
from rlcore.data.keys import nearest, value_at
from rlcore.errors import ConfigError, DataError

FORMATS = (".jsonl", ".json", ".parquet")
SPLIT_NAMES = {"train": ("train",), "eval": ("test", "eval", "validation")}
HELD_OUT_SHARE = 0.1

Row = dict[str, Any]


def load(config: DataConfig, split: str) -> list[Row]:
    """Return the rows of a split ("train" or "eval") of the file or folder at `data.path`.

    A folder holds `train` and one of `test`, `eval` and `validation`, each as .jsonl, .json (a list) or .parquet. From
    a single file a tenth of the prompts (at least one) is held out, chosen by a hash of the prompt. Raises ConfigError
    when `data.path` or a file is missing, DataError for faults in a file.
    """
    path = data_path(config, "a .jsonl, .json or .parquet file, or a folder with train and test files")
    if path.is_dir():
        return _read_checked(_split_file(path, split), config)
    rows = _read_checked(path, config)
    held_out = _held_out_prompts(rows, config.prompt_key)
    chosen = [row for row in rows if (_fingerprint(value_at(row, config.prompt_key)) in held_out) == (split == "eval")]
    if not chosen:
        raise DataError(
            f"{path} holds one prompt, which is held out: nothing is left to train on. Give a file with more "
            "prompts, or a folder with train.jsonl and test.jsonl."
        )
    return chosen


def data_path(config: DataConfig, expected: str) -> Path:
    """Return `data.path` as an existing path; ConfigError names `expected` when it is unset or missing."""
    if config.path is None:
        raise ConfigError(f"data={config.name} reads from data.path, which is not set; set it to {expected}")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise ConfigError(f"data.path={config.path}: there is no such file or folder; give {expected}")
    return path


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a .jsonl, .json or .parquet file; DataError names file and line."""
    if path.suffix not in FORMATS:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without an ending'}; allowed: {', '.join(FORMATS)}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; it must hold at least one row")
    rows = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[path.suffix](path)
    if not rows:
        raise DataError(f"{path} holds no rows; it must hold at least one")
    return rows


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


def _read_checked(path: Path, config: DataConfig) -> list[Row]:
    rows = read_rows(path)
    require_column(rows, config.prompt_key, path, "data.prompt_key")
    # Some rewards need no answer, so the column is required only when the config names it.
    if config.answer_key != DataConfig.answer_key:
        require_column(rows, config.answer_key, path, "data.answer_key")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as lines:
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
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        hint = " It looks like JSON Lines: name it .jsonl." if error.msg == "Extra data" else ""
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}.{hint}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it, for example with iconv") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: a .json file must hold a list of objects, got {_kind(rows)}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: each row must be a JSON object, got {_kind(row)}")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    dataset = dataset_class()
    import pyarrow  # type: ignore[import-untyped]  # comes with datasets
    from pyarrow import parquet  # type: ignore[import-untyped]

    try:
        # Read here, since `datasets` itself would leave a converted copy in the user's cache folder.
        return dataset(parquet.ParquetFile(path).read()).to_list()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _split_file(folder: Path, split: str) -> Path:
    candidates = [folder / f"{name}{suffix}" for name in SPLIT_NAMES[split] for suffix in FORMATS]
    found = [path for path in candidates if path.is_file()]
    if not found:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise ConfigError(
            f"data.path={folder} has no file for the {split} split: looked for {' or '.join(SPLIT_NAMES[split])} with "
            f"the ending {', '.join(FORMATS)}; the folder holds {there}"
        )
    if len(found) > 1:
        raise ConfigError(
            f"data.path={folder} has several files for the {split} split: {', '.join(path.name for path in found)}; "
            "keep only one of them"
        )
    return found[0]


def _held_out_prompts(rows: Sequence[Row], prompt_key: str) -> set[str]:
    # By hash, not by position: adding rows to the file leaves the split of the others almost unchanged.
    fingerprints = sorted({_fingerprint(value_at(row, prompt_key)) for row in rows})
    return set(fingerprints[: max(1, round(len(fingerprints) * HELD_OUT_SHARE))])


def _fingerprint(prompt: Any) -> str:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
