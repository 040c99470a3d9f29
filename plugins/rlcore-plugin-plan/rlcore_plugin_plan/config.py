"""The planner's own config: the keys `plan.*`."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore import option


@dataclass(frozen=True)
class PlanConfig:
    """The devices that `rlcore plan` and `cluster.pools=auto` plan for."""

    device: str | None = option(
        None,
        "device profile to plan for: a name or a file, or several with counts, as h100:8+a100-80g:16 (default: the "
        "detected devices)",
        was="cluster.device",
        incidental=True,
    )
    gpus: int | None = option(
        None, "number of devices to plan for (default: all detected)", min=1, was="cluster.gpus", incidental=True
    )
