"""The base class of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker:
    """Records a run's numbers and samples. A subclass overrides the methods that it needs.

    rlcore creates a tracker with (config, run_dir), calls `start`, then the other methods, then `finish`, all in the
    controller's process. An exception ends the run, so a tracker of a remote service must handle its outages.
    """

    def start(self, resume_step: int) -> None:
        """Begin, before the first step. Raises ConfigError when the tracker cannot work.

        `resume_step` is the step that the run continues after; records of later steps are void. 0 for a fresh run.
        """

    def described(self, lines: Sequence[str]) -> None:
        """Record on which devices and how the run computes, in words; called once, right after `start`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, floats by name, possibly not finite. Step 0 is the evaluation before training."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record some samples of a step, one mapping each: uid, prompt_text, response_text, answer, score and more."""

    def saved(self, step: int, path: Path) -> None:
        """Record that a checkpoint was written to `path`."""

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """End. `status` is finished, interrupted or failed; `summary` is the content of summary.json, or empty."""
