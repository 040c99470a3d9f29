"""The tracker that is always on: metrics.jsonl and samples/ in the run folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlcore.config.schema import Config
from rlcore.trackers.base import Tracker

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

    def start(self, resume_step: int) -> None:
        """Open the file, and delete the lines and samples of steps that a resumed run will repeat."""
        kept = [line for line in _lines(self._path) if resume_step > 0 and line["step"] <= resume_step]
        aside = self._path.with_suffix(".writing")
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(aside, self._path)
        self._samples.mkdir(exist_ok=True)
        for path in self._samples.glob("step_*.jsonl"):
            if resume_step == 0 or int(path.stem.removeprefix("step_")) > resume_step:
                path.unlink()
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

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return a file's objects up to the first broken line, such as the last line of a killed run."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                return lines
            lines.append(line)
    return lines


def _plain(value: Any) -> Any:
    """Return a NumPy or torch value as plain Python values, anything else as its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
