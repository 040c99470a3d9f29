"""The base class of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker:
    """Takes a run's numbers and samples somewhere; overrides what it has a use for.

    Made with (config, run_dir), then `start`, any number of the others, and `finish`, all in the controller's process.
    An exception ends the run, so a tracker of a service that can be out of reach copes with that itself.
    """

    def start(self, resume_step: int) -> None:
        """Begin, before the first step. Raises ConfigError when the tracker cannot work.

        `resume_step`: the run goes on after this step, and what was logged of later ones is void; 0 for a fresh run.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step's metrics, floats by name, some perhaps not finite. Step 0 is the evaluation before training."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take some samples of a step, one mapping each: uid, prompt_text, response_text, answer, score and more."""

    def saved(self, step: int, path: Path) -> None:
        """Take note of a checkpoint."""

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """End. `status` is finished, interrupted or failed; `summary` is what summary.json holds, or empty."""
