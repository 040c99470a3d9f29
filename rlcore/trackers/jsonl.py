"""The tracker that is always on: metrics.jsonl and samples/ in the run folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlcore.config.schema import Config
from rlcore.trackers.base import Tracker
from rlcore.training.fork import source_step

_log = logging.getLogger(__name__)

METRICS, SAMPLES = "metrics.jsonl", "samples"


class JsonlTracker(Tracker):
    """Writes RUN/metrics.jsonl, one object per step, and RUN/samples/step_000012.jsonl, one object per sample.

    A line of metrics is on disk when `log` returns. JSON has no NaN and no infinity: such a metric is written as the
    string "nan", "inf" or "-inf", which `float` reads.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._samples = run_dir / SAMPLES
        self._file: IO[str] | None = None
        forked_at = source_step(config)
        self._first_step = 0 if config.trainer.eval_every and not forked_at else forked_at + 1
        self.sample_rows = 0
        """The rows of samples in the files."""
        self.expected_rows = 0
        """The rows that a resumed run should find."""

    def start(self, resume_step: int) -> None:
        """Open the file, and delete the lines and samples of steps that a resumed run will repeat.

        Lines that cannot be read are moved to a file beside theirs (`metrics.jsonl.damaged`), and lost steps are named.
        """
        kept = []
        if resume_step > 0:
            kept = [line for line in _read(self._path, steps=True) if line["step"] <= resume_step]
            if lost := sorted({*range(self._first_step, resume_step + 1)} - {line["step"] for line in kept}):
                _log.warning("%s lacks the lines of steps %s", self._path, _numbers(lost))
        _replace(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._samples.mkdir(exist_ok=True)
        rows: dict[int, int] = {}
        for path in self._samples.glob("step_*.jsonl"):
            match = re.fullmatch(r"step_(\d+)", path.stem)
            if match is None:
                continue  # a file of somebody else
            step = int(match.group(1))
            if step > resume_step or resume_step == 0:
                path.unlink()
            else:
                rows[step] = len(_read(path))
        self.sample_rows = sum(rows.values())
        if self.sample_rows < self.expected_rows:
            without = sorted({*range(max(1, self._first_step), resume_step + 1)} - {*rows})
            text = "%s has %d of the %d rows that the checkpoint counts; there is no file for steps %s"
            _log.warning(text, self._samples, self.sample_rows, self.expected_rows, _numbers(without))
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (open for as long as the run lasts)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line: `step` and the metrics."""
        assert self._file is not None
        line = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **line}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint of this step must not outlive its line

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows to the step's file; values without a JSON form are written as text."""
        with open(self._samples / f"step_{step:06d}.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n" for row in rows)
        self.sample_rows += len(rows)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()


def _read(path: Path, *, steps: bool = False) -> list[dict[str, Any]]:
    """Return a file's objects, with `steps` those of a step; other lines are named and moved to a file beside it.

    The end of a last line that a killed run did not finish is moved without a word.
    """
    if not path.exists():
        return []
    texts = path.read_bytes().split(b"\n")
    found: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(texts, start=1):
        with contextlib.suppress(ValueError):  # of text that is neither JSON nor UTF-8
            line = json.loads(text)
            if isinstance(line, dict) and (not steps or type(line.get("step")) is int):
                found[number] = line
    bad = {number: text for number, text in enumerate(texts, start=1) if text and number not in found}
    if bad:
        aside = path.with_name(path.name + ".damaged")
        with open(aside, "ab") as file:
            file.writelines(text + b"\n" for text in bad.values())
        _replace(path, b"".join(texts[number - 1] + b"\n" for number in found))
        bad.pop(len(texts), None)
    if bad:
        _log.warning("%s: lines %s cannot be read; they are now in %s", path, _numbers([*bad]), aside)
    return list(found.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl in order, and change nothing; lines that cannot be read are left out."""
    found = []
    for text in path.read_bytes().split(b"\n") if path.is_file() else ():
        with contextlib.suppress(ValueError):  # of text that is neither JSON nor UTF-8
            line = json.loads(text)
            if isinstance(line, dict) and type(line.get("step")) is int:
                found.append(line)
    return found


def _numbers(steps: Sequence[int]) -> str:
    return (", ".join(map(str, steps[:10])) + (" ..." if len(steps) > 10 else "")) or "(none)"


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    aside = path.with_suffix(".writing")
    aside.write_bytes(content)
    os.replace(aside, path)


def _plain(value: Any) -> Any:
    """Return a NumPy or torch value as plain Python values, anything else as its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
