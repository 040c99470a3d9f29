"""The Ray session on which processes, pools and executors were made: they are of no use on a later one."""

from __future__ import annotations

import ray

from rlcore.errors import WorkerError


class RaySession:
    """This process's present connection to Ray."""

    def __init__(self) -> None:
        self._id = _session_id()

    @property
    def is_current(self) -> bool:
        """Whether this process is still connected to it."""
        return self._id == _session_id()

    def check(self, made: str) -> None:
        """Raise WorkerError if the session has ended; `made` names what was made on it."""
        if not self.is_current:
            raise WorkerError(
                f"{made} was made on a Ray session that has ended: ray.shutdown() was called since. Make executor, "
                "pool and group anew."
            )


def _session_id() -> tuple[str, str] | None:
    """Return the node and the job of this process, which no two connections share; None without a connection."""
    if not ray.is_initialized():  # else Ray would start itself
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()
