"""The choice of the executor, in its own file because both executors import `executor.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rlcore.workers.executor import Executor

if TYPE_CHECKING:
    from rlcore.config.schema import ClusterConfig


def make_executor(
    cluster: ClusterConfig,
    *,
    log_dir: Path | None = None,
    by_value_modules: Sequence[ModuleType] = (),
    distributions: Mapping[str, str] | None = None,
) -> Executor:
    """Return the executor that `cluster.executor` names, not started yet.

    Each worker process writes to `log_dir`/NAME-RANK.log. Classes and functions of `by_value_modules`, files that
    workers cannot import, are sent by value. Every worker checks that it has the `distributions` (version by name).
    """
    if cluster.executor == "in_process":
        from rlcore.workers.in_process import InProcessExecutor

        return InProcessExecutor(cluster)
    from rlcore.workers.ray.executor import RayExecutor

    return RayExecutor(cluster, log_dir=log_dir, by_value_modules=by_value_modules, distributions=distributions or {})
