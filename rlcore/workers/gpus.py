"""The GPUs of this machine or of a Ray cluster, which `auto` in a config asks for."""

from __future__ import annotations

import re

from rlcore.config.devices import Gpus, local_gpus
from rlcore.config.schema import ClusterConfig
from rlcore.workers.choose_executor import make_executor

HAVE_BF16 = re.compile(r"accelerator_type:(([ALHB]|GH|GB)\d|AMD-Instinct-MI)")
"""Ray's resources of kinds of GPUs that compute in bf16: Ampere and later, and AMD's Instinct."""


def find_gpus(address: str | None) -> Gpus:
    """Return the GPUs of the Ray cluster at `address`; None: those of this machine.

    Raises WorkerError when the cluster cannot be reached.
    """
    if address is None:
        return local_gpus()
    kinds, _ = cluster_accelerators(ClusterConfig(address=address))
    names = " or ".join(kind.removeprefix("accelerator_type:") for kind in sorted(kinds))
    return Gpus(
        sum(kinds.values()), names, bool(kinds) and all(map(HAVE_BF16.match, kinds)), "the Ray cluster has none"
    )


def cluster_accelerators(cluster: ClusterConfig) -> tuple[dict[str, int], int]:
    """Return the devices of a Ray cluster: GPUs by Ray's resource for their kind, and the cores of all nodes."""
    with make_executor(cluster):  # uses the connection to Ray that this process may have, and leaves it open
        from rlcore.workers.ray.nodes import accelerators

        return accelerators()
