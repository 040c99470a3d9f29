"""The data set `file`: rows of local files and folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlcore.config.schema import DataConfig
from rlcore.data.formats import FORMATS, read_rows, require_column
from rlcore.data.schemas import asked, plain_rows, recognise, with_keys
from rlcore.data.splits import split_files
from rlcore.errors import ConfigError, DataError
from rlcore.hub import dataset_folder, is_pinned


def load(config: DataConfig, split: str) -> list[Mapping[str, Any]]:
    """Return the rows of a split ("train" or "eval") of the file or folder at `data.path`.

    A folder holds a training split, and perhaps a held-out one (`rlcore.data.splits`). Without one, as in a single
    file, `data.held_out_share` of the prompts (at least one) is held out, chosen by a hash of the prompt. Raises
    ConfigError when `data.path`, a split or a file is missing, DataError for faults in a file.
    """
    path = data_path(
        config, "a .jsonl, .json, .parquet or .arrow file, a folder with train and test files, or a name on the hub"
    )
    held_out_files = chosen_files(path, config, "eval")
    if split == "eval" and held_out_files is not None:
        return _read_checked(held_out_files, config)[0]
    train_files = chosen_files(path, config, "train") or []
    if held_out_files is not None:
        return _read_checked(train_files, config)[0]
    written = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in train_files)
    chosen = _halves(written, config.prompt_key, config.answer_key, config.held_out_share)[split == "eval"]
    if split == "eval":
        _halves.cache_clear()  # the second of the two has been asked for
    if not chosen:
        raise DataError(
            f"{path} has no prompt that is not held out (data.held_out_share={config.held_out_share:g}): nothing is "
            "left to train on. Give a file with more prompts, a smaller share, or a folder with train.jsonl and "
            "test.jsonl."
        )
    return list(chosen)


def data_path(config: DataConfig, expected: str) -> Path:
    """Return `data.path` as an existing path; ConfigError names `expected` when it is unset or missing.

    Of a name on the hub it is the folder in the cache, after fetching the files of `data.subset`.
    """
    if config.path is None:
        raise ConfigError(f"data={config.name} reads from data.path, which is not set; set it to {expected}")
    if is_pinned(config.path):
        return dataset_folder(config.path, config.subset, FORMATS)
    path = Path(config.path).expanduser()
    if not path.exists():
        raise ConfigError(f"data.path={config.path}: there is no such file or folder; give {expected}")
    return path


def chosen_files(path: Path, config: DataConfig, split: str) -> list[Path] | None:
    """Return the files of a split of `path`, a file or folder; None where it has no held-out split."""
    if path.is_dir():
        return split_files(path, config, split)
    for key in ("subset", "train_split", "eval_split"):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(f"data.{key}={value}: data.path={path} is one file, which has no splits; drop the key")
    return [path] if split == "train" else None


def _read_checked(files: Sequence[Path], config: DataConfig) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return the rows of all files, and each one's prompt."""
    read = [(path, read_rows(path)) for path in files]
    first = read[0][1]
    keyed = with_keys(config, recognise(config, first), first)
    rows: list[Mapping[str, Any]] = []
    prompts: list[Any] = []
    for path, given in read:
        plain = plain_rows(given, keyed, str(path))
        require_column(plain, keyed.prompt_key, path, "data.prompt_key")
        # Some rewards need no answer, so the column is required only when the config names it.
        if config.answer_key != DataConfig.answer_key:
            require_column(plain, config.answer_key, path, "data.answer_key")
        rows += given
        prompts += [asked(row, keyed.prompt_key) for row in plain]
    return rows, prompts


@lru_cache(maxsize=1)
def _halves(
    written: Sequence[tuple[Path, int, int]], prompt_key: str, answer_key: str, share: float
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the rows to train on and the held-out ones of files with one split; a loader asks for the two in turn.

    written: each file, with its time and size, so that a file that has changed is read again.
    """
    rows, prompts = _read_checked(
        [file for file, _, _ in written], DataConfig(prompt_key=prompt_key, answer_key=answer_key)
    )
    hashes = [_fingerprint(prompt) for prompt in prompts]
    held_out = _held_out(hashes, share)
    halves: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] = [], []
    for row, each in zip(rows, hashes, strict=True):
        halves[each in held_out].append(row)
    return halves


def _held_out(hashes: Sequence[str], share: float) -> set[str]:
    # By hash, not by position: adding rows to the file leaves the split of the others almost unchanged.
    different = sorted({*hashes})
    return set(different[: max(1, round(len(different) * share))])


def _fingerprint(prompt: Any) -> str:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()
