"""Trackers: where a run's numbers and samples go. Files in the run folder always; console, wandb, others by choice."""

from rlcore.trackers.base import Tracker
from rlcore.trackers.trackers import Trackers

__all__ = ["Tracker", "Trackers"]
