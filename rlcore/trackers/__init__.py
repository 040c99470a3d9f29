"""Trackers record a run's numbers and samples: always as files in the run folder, by choice on console, wandb etc."""

from rlcore.trackers.base import Tracker
from rlcore.trackers.trackers import Trackers

__all__ = ["Tracker", "Trackers"]
