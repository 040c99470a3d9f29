"""The errors that rlcore raises on purpose, and the wording that they share.

Every message names the fault, the value, the allowed values, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLCoreError(Exception):
    """Base of all errors that a user can cause and fix; the CLI prints them without a traceback."""


class ConfigError(RLCoreError):
    """A key, a value or a combination of values is not allowed. Raised before any expensive work starts."""


class PluginError(RLCoreError):
    """A plugin cannot be loaded or breaks its contract; the message says how to block it."""


class NoRoleError(PluginError, AttributeError):
    """An algorithm uses a role of the run that it does not declare."""


class DataError(RLCoreError):
    """A data set, a batch or a column breaks a requirement."""


class MissingColumnError(DataError, KeyError):
    """A batch lacks a column. A KeyError too, since a batch's columns are a mapping."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class WorkerError(RLCoreError):
    """A worker failed or died; the message names role, rank, host and method."""


class SandboxError(RLCoreError):
    """A process for model-written code cannot be set up; the message names the layer that the machine refuses."""


class WeightsError(RLCoreError):
    """The weights in use are not the trained ones, or training changes none; the message names the parameters."""


class DeviceMemoryError(RLCoreError):
    """A call does not fit into a GPU's memory; the message names the call, its batch and the keys that lower it."""


class EpisodesError(RLCoreError):
    """More episodes of a batch failed than `env.max_failures` allows."""


class RewardsError(RLCoreError):
    """More samples of a call have no reward than `reward.max_failures` allows."""


class ExitError(RLCoreError):
    """Code that a run called, a plugin's for instance, tried to end the process; the message names the place."""


class CheckpointError(RLCoreError):
    """A checkpoint cannot be written, read or resumed from."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the option nearest to `name`, or an empty string when none is near."""
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
