"""Rows that a program gives: written as JSON Lines into the run folder, where `data=file` reads them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import DataError

ROWS = "rows"
"""The folder of such rows in a run folder."""


@dataclass(frozen=True)
class GivenRows:
    """The JSON Lines of each split by its name; equal rows have the same path, so that a run of them is resumed."""

    splits: Mapping[str, bytes]

    def path(self, run: Path) -> Path:
        """Return their folder in a run folder: an absolute path, named by a hash of the rows."""
        digest = hashlib.sha256()
        for split, lines in self.splits.items():
            digest.update(f"{split} {len(lines)}\n".encode() + lines)
        return run.resolve() / ROWS / digest.hexdigest()[:12]

    def write(self, run: Path) -> None:
        """Write them into a run folder. Raises DataError when the disk refuses."""
        folder = self.path(run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for split, lines in self.splits.items():
                aside = folder / f"{split}.writing"
                aside.write_bytes(lines)
                os.replace(aside, folder / f"{split}.jsonl")
        except OSError as error:
            raise DataError(f"the rows cannot be written to {folder}: {error.strerror or error}") from error


def encode_rows(rows: Iterable[Mapping[str, Any]], argument: str) -> bytes:
    """Return rows as JSON Lines. Raises DataError, naming the argument, for none and for one that JSON cannot hold."""
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise DataError(f"{argument} is {rows!r:.80}; give a list of dicts, or one split of a data set")
    lines = [_line(row, f"{argument}, row {number}") for number, row in enumerate(rows)]
    if not lines:
        raise DataError(f"{argument} has no rows")
    return "".join(lines).encode()


def _line(row: Mapping[str, Any], where: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: {row!r} is a {type(row).__name__}; a row is a dict of columns")
    for column, value in row.items():
        if not isinstance(column, str):
            raise DataError(f"{where}: the column {column!r} is a {type(column).__name__}; names of columns are texts")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{where}, column {column!r}: {value!r:.80} cannot be written as JSON: {error}. Give texts, finite "
                "numbers, bools, None, and lists and dicts of them"
            ) from error
    return json.dumps(dict(row)) + "\n"
