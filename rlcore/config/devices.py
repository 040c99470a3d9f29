"""Resolves `auto`: the GPUs that torch finds decide the workers, the GPUs of each worker, and the precision.

The values are resolved once, when a config is composed. A run folder has the resolved values, so a resumed run keeps
them.
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config.files import begun_values
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.config.schema import ClusterConfig, Config

AUTO = "auto"
CPU_WORKERS = 2
"""Workers of a run on Ray without a GPU."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a run may use. `reason`: the cause if there is none. `bf16`: whether all of them support bf16."""

    count: int = 0
    name: str = ""
    bf16: bool = False
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.count} x {self.name}" if self.count else f"no GPU ({self.reason})"


FindGpus = Callable[[str | None], Gpus]
"""Returns the GPUs of the Ray cluster at an address; None: those of this machine."""


def local_gpus(address: str | None = None) -> Gpus:
    """Return the GPUs of this machine that torch can use. `address` is ignored: config cannot ask a cluster."""
    import torch

    if not torch.cuda.is_available():
        return Gpus(reason=_why_none(torch.version.cuda is not None or torch.version.hip is not None))
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    bf16 = torch.version.hip is not None or all(torch.cuda.get_device_capability(i)[0] >= 8 for i in range(count))
    return Gpus(count, " or ".join(sorted(names)), bf16)


def _why_none(built_for_gpus: bool) -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    if not built_for_gpus:
        return "torch is built without CUDA"
    return "torch finds none"


def resolve_auto(values: Mapping[str, Any], find: FindGpus) -> dict[str, Any]:
    """Return the plain values of a config with each `auto` of devices, precisions and the date resolved.

    Values of the wrong type are left for `build_config` to refuse. A run that has begun in `run.dir` keeps its device,
    its precisions and its date. Raises ConfigError when it has GPUs and there are none here.
    """
    resolved = copy.deepcopy(dict(values))
    cluster, roles, model = (_mapping(resolved, name) for name in ("cluster", "roles", "model"))
    if model.get("date") == AUTO:
        begun = _begun(_mapping(resolved, "run").get("dir"))
        model["date"] = begun.get("model", {}).get("date") if begun else datetime.date.today().isoformat()
    with_dtype = {"model": model}
    with_dtype |= {f"roles.{name}": role for name, role in roles.items() if isinstance(role, dict)}
    choosing = {path: holder for path, holder in with_dtype.items() if holder.get("dtype") == AUTO}
    if not choosing and AUTO not in (cluster.get("workers"), cluster.get("gpus_per_worker")):
        return resolved
    gpus, begun = find(cluster.get("address")), _begun(_mapping(resolved, "run").get("dir"))
    _resolve_gpus(cluster, gpus, begun)
    _resolve_workers(cluster, _mapping(resolved, "engine"), gpus)
    chosen = "bf16" if gpus.bf16 and _uses_gpus(cluster) else "fp32"
    for path, holder in choosing.items():
        saved: Any = begun
        for part in path.split("."):
            saved = saved.get(part, {})
        holder["dtype"] = saved.get("dtype") or chosen
    return resolved


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _begun(folder: Any) -> Mapping[str, Any]:
    return begun_values(Path(folder).expanduser()) if isinstance(folder, str) else {}


def _is_above_0(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _resolve_gpus(cluster: dict[str, Any], gpus: Gpus, begun: Mapping[str, Any]) -> None:
    """Set `gpus_per_worker` where it is `auto`: pools that are more than the GPUs share them."""
    if cluster.get("gpus_per_worker") != AUTO:
        return
    saved, pools = begun.get("cluster", {}).get("gpus_per_worker"), _pools_to_fill(cluster)
    if saved and not gpus.count:
        raise ConfigError(
            f"the run in run.dir began with {saved:g} GPUs for each worker, and here is {gpus}. Resume it on a machine "
            "with a GPU, or begin a new run in another folder"
        )
    if saved is not None:
        cluster["gpus_per_worker"] = saved
    elif gpus.count >= pools or cluster.get("executor") == "in_process":
        cluster["gpus_per_worker"] = 1.0 if gpus.count else 0.0
    else:
        cluster["gpus_per_worker"] = int(100 * gpus.count / pools) / 100


def _resolve_workers(cluster: dict[str, Any], engine: Mapping[str, Any], gpus: Gpus) -> None:
    """Set `workers` where it is `auto`: as many as get GPUs, in whole groups of `engine.pp` * `engine.tp`."""
    if cluster.get("workers") != AUTO:
        return
    if cluster.get("executor") == "in_process":
        cluster["workers"] = 1
    elif gpus.count and _is_above_0(each := cluster.get("gpus_per_worker")):
        most = int(gpus.count / max(1.0, float(each or 0))) // _pools_to_fill(cluster)
        ranks = 1
        for size in (engine.get("pp"), engine.get("tp")):
            ranks *= size if type(size) is int and size > 0 else 1
        cluster["workers"] = max(ranks, most // ranks * ranks)
    else:
        cluster["workers"] = CPU_WORKERS


def _pools_to_fill(cluster: Mapping[str, Any]) -> int:
    """Return the number of pools, at least 1, that divide the GPUs: with models, and without `workers` of their own."""
    pools = [pool if isinstance(pool, dict) else {"roles": pool} for pool in _mapping(cluster, "pools").values()]
    return max(1, sum(pool.get("roles") != ["reward"] and pool.get("workers") is None for pool in pools))


def _uses_gpus(cluster: Mapping[str, Any]) -> bool:
    own = [pool.get("gpus_per_worker") for pool in _mapping(cluster, "pools").values() if isinstance(pool, dict)]
    return any(map(_is_above_0, (cluster.get("gpus_per_worker"), *own)))


def uses_gpus(cluster: ClusterConfig) -> bool:
    """Return whether any worker of a run has a GPU, or a share of one."""
    return _uses_gpus(vars(cluster))


def device_lines(config: Config, gpus: Gpus) -> list[str]:
    """Return the lines that say on which devices and in which precision a run computes, and why."""
    cluster, dtype = config.cluster, config.model.dtype
    workers = f"{cluster.workers} worker{'s' if cluster.workers > 1 else ''} on Ray"
    if cluster.executor == "in_process":
        workers = "this process"
    if cluster.pools:
        workers += " in each pool without `workers` of its own"
    if cluster.gpus_per_worker > 0:
        device = f"{workers}, {cluster.gpus_per_worker:g} GPU each; there is {gpus}"
        why = "the GPU has bf16" if dtype == "bf16" else "model.dtype says so" if gpus.bf16 else "the GPU has no bf16"
    else:
        given = ", as cluster.gpus_per_worker is 0, as given or as the run began" if gpus.count else ""
        device = f"{workers}, on the CPU{given}; there is {gpus}"
        why = "model.dtype says so" if dtype == "bf16" else "bf16 is chosen on a GPU only"
    return [f"device: {device}", f"precision: {dtype}, as {why}"]
