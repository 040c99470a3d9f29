"""Sets each role's tokens of a micro-batch for `engine.micro_batch_tokens=auto`: as measured, or as kept by the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlcore.config import Config
from rlcore.engine.update.micro_batch_size import MicroBatchSize
from rlcore.errors import CheckpointError
from rlcore.roles.handles import RoleHandle

log = logging.getLogger(__name__)


def fit_micro_batches(
    roles: Mapping[str, RoleHandle], config: Config, kept: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Set the sizes on all workers and return them by role, as plain values; roles on a CPU are left out.

    kept: the result of an earlier part of the run. A role whose card or layout is another one now is measured again,
    and a warning says so.
    """
    longest = config.data.prompt_len + config.rollout.response_len
    found = {}
    # One role after the other, as several may share a GPU.
    for name, role in roles.items():
        try:
            before = MicroBatchSize(**kept[name]) if name in kept else None
        except TypeError as error:
            raise CheckpointError(
                f"micro_batches.json has {kept[name]!r} for {name}: {error}; remove this file of the run folder"
            ) from error
        size = role.group.fit_micro_batches(before, longest)[0]
        if size is None:
            continue
        found[name] = asdict(size)
        if before is not None and size.tokens != before.tokens:
            log.warning(
                "%s: micro-batches have %d tokens, and had %d on %s. On %s they were measured again, so sums may round "
                "differently",
                *(name, size.tokens, before.tokens, before.place, size.place),
            )
    return found
