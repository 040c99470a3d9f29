"""The keys `data.verifiers.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcore import option


@dataclass(frozen=True)
class TasksetConfig:
    """Which taskset, and its own settings."""

    taskset: str | None = option(None, "the taskset's id: a built-in one of verifiers, or an installed package")
    options: dict[str, Any] = option({}, "the taskset's config, as verifiers' --env.taskset.* keys")
    limit: int = option(0, "tasks that are read, from the first; 0: all (an infinite taskset needs a limit)", min=0)
    held_out: float = option(0.1, "share of the tasks that is held out, at least one", min=0.0, max=0.9)
