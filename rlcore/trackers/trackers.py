"""Trackers, which passes each record to all trackers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.schema import Config
from rlcore.errors import ConfigError, DataError, did_you_mean
from rlcore.exits import exit_error
from rlcore.plugins.specs import TrackerSpec
from rlcore.trackers.base import Tracker
from rlcore.trackers.jsonl import JsonlTracker


class Trackers:
    """All trackers of a run: the files in the run folder first, then those of `tracker.use`, in that order.

    An error in a tracker ends the run, and a note on the error names the tracker: a run without records is not worth
    its time. A tracker of a remote service must handle its outages.
    """

    def __init__(self, config: Config, run_dir: Path, installed: Mapping[str, TrackerSpec]) -> None:
        """`installed` holds the plugins' trackers by name. Raises ConfigError for a name that is not among them."""
        self._files = JsonlTracker(config, run_dir)
        self._trackers: dict[str, Tracker] = {"jsonl": self._files}
        for name in config.tracker.use:
            if name in self._trackers:
                continue
            if name not in installed:
                raise ConfigError(
                    f"tracker.use: {name!r} is not installed; installed are {', '.join(sorted(installed)) or 'none'}."
                    f"{did_you_mean(name, installed)}"
                )
            self._trackers[name] = installed[name].create(config, run_dir)
        self._started: dict[str, Tracker] = {}
        self._evaluation: dict[str, float] = {}

    @property
    def sample_rows(self) -> int:
        """The rows of samples in the run folder's files."""
        return self._files.sample_rows

    def start(self, resume_step: int = 0, sample_rows: int = 0) -> None:
        """Start all trackers, before training, of a run that continues after `resume_step` (0: from its start).

        sample_rows: the rows of samples that the run folder had at this step; lost ones are named in a warning.

        When one fails to start, those already started are finished with the status "failed".
        """
        self._files.expected_rows = sample_rows
        for name, tracker in self._trackers.items():
            try:
                _call(name, tracker.start, resume_step)
            except BaseException:
                self.finish("failed", {})
                raise
            self._started[name] = tracker

    def described(self, lines: Sequence[str]) -> None:
        """Record on which devices and how the run computes."""
        for name, tracker in self._started.items():
            _call(name, tracker.described, lines)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, with those of the evaluation at this step."""
        numbers = {name: _number(name, value) for name, value in {**self._evaluation, **metrics}.items()}
        self._evaluation = {}
        for name, tracker in self._started.items():
            _call(name, tracker.log, step, numbers)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation: at step 0, before training, at once; a later one with its step's metrics."""
        self._evaluation = dict(metrics)
        if step == 0:
            self.log(0, {})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record samples of a step: their texts, rewards, and the causes of failed rewards."""
        for name, tracker in self._started.items():
            _call(name, tracker.samples, step, rows)

    def saved(self, step: int, path: Path) -> None:
        """Record that a checkpoint was written."""
        for name, tracker in self._started.items():
            _call(name, tracker.saved, step, path)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Finish every started tracker, even if one of them raises; then raise the first error."""
        started, self._started = self._started, {}
        errors: list[Exception] = []
        for name, tracker in started.items():
            try:
                _call(name, tracker.finish, status, summary)
            except Exception as error:  # raised below, when the others have finished too
                errors.append(error)
        if errors:
            raise errors[0]


def _call(name: str, method: Callable[..., None], *args: Any) -> None:
    try:
        method(*args)
    except OSError as error:
        raise DataError(
            f"the tracker {name!r} cannot write: {error}. The last checkpoint is safe: free disk space, then resume "
            "with the same command."
        ) from error
    except SystemExit as end:
        raise exit_error(end) from end
    except Exception as error:
        error.add_note(f"(in the tracker {name!r}; leave it out of tracker.use to run without it)")
        raise


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}, not a number") from error
