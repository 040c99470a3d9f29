"""Which devices are planned for: those that `cluster.device` and `cluster.gpus` name, or those that are found."""

from __future__ import annotations

import os

from rlcore.config.schema import ClusterConfig
from rlcore import ConfigError
from rlcore_plugin_plan.problem import Devices
from rlcore_plugin_plan.profile import load, shipped, stored

HERE = "here"
"""The profile that `rlcore plan --calibrate` makes of this machine unless it is given another name."""


def devices(cluster: ClusterConfig) -> tuple[Devices, ...]:
    """Return the devices of each kind. `cluster.device` is NAME, or NAME:COUNT joined by + for several kinds.

    The in-process executor has one.

    Raises ConfigError for an unknown kind, counts that contradict each other, and for kinds without a count.
    """
    found = _found(cluster) if cluster.device is None or cluster.gpus is None else {}
    if cluster.executor == "in_process":
        found = dict.fromkeys(found, 1)
    kinds: dict[str, int | None]
    if cluster.device is None:
        kinds = {**found} if cluster.gpus is None else {next(iter(found)): cluster.gpus}
    else:
        kinds = _parsed(cluster.device)
        if len(kinds) == 1:
            (name,) = kinds
            asked = kinds[name] if kinds[name] is not None else cluster.gpus
            kinds[name] = asked if asked is not None else found.get(name)
    made = []
    for name, counted in kinds.items():
        profile = load(name)
        if counted is None:
            raise ConfigError(
                f"cluster.device = {cluster.device}: there is none of {name} here, so say how many are planned for: "
                f"cluster.gpus=8, or cluster.device={name}:8"
            )
        made.append(Devices(profile, counted))
    total = sum(each.count for each in made)
    if cluster.gpus not in (None, total):
        raise ConfigError(
            f"cluster.gpus = {cluster.gpus}, but cluster.device = {cluster.device} names {total}: leave out one of them"
        )
    if any(each.profile.cpu for each in made) and any(not each.profile.cpu for each in made):
        raise ConfigError(f"cluster.device = {cluster.device}: processor cores and GPUs cannot be planned together")
    return tuple(made)


def _parsed(text: str) -> dict[str, int | None]:
    """Read NAME or NAME:COUNT+NAME:COUNT."""
    kinds: dict[str, int | None] = {}
    several = "+" in text
    for part in text.split("+"):
        name, colon, count = part.partition(":")
        if (colon and not (count.isdigit() and int(count) > 0)) or not name or (several and not colon) or name in kinds:
            raise ConfigError(
                f"cluster.device = {text!r} must be NAME, or NAME:COUNT with counts from 1 and each name once, as "
                "h100:8+a100-80g:16"
            )
        kinds[name] = int(count) if colon else None
    return kinds


def _found(cluster: ClusterConfig) -> dict[str, int]:
    """Return the devices of the cluster that `cluster.address` names, or of this machine, by profile."""
    if cluster.address is not None:
        from rlcore.workers import make_executor
        from rlcore.workers.ray_nodes import accelerators

        with make_executor(cluster):
            kinds, cores = accelerators()
        known = {load(name).node: name for name in shipped()}
        if unknown := [kind for kind in kinds if kind not in known]:
            raise ConfigError(
                f"the cluster at {cluster.address} has {unknown[0]}, of which there is no device profile: measure it "
                "there with `rlcore plan --calibrate`, and name it with cluster.device=FILE.yaml"
            )
        if kinds:
            return {known[kind]: count for kind, count in kinds.items()}
        return {_cpu(): max(1, cores // cluster.cpus_per_worker)}
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
        kind = HERE if HERE in stored() and not load(HERE).cpu else _named(name, gigabytes)
        return {kind: torch.cuda.device_count()}
    return {_cpu(): max(1, len(os.sched_getaffinity(0)) // cluster.cpus_per_worker)}


def _cpu() -> str:
    return HERE if HERE in stored() and load(HERE).cpu else "cpu"


def _named(name: str, gigabytes: float) -> str:
    kinds = {"A100": "a100-80g", "H100": "h100", "H200": "h200"}
    for part, kind in kinds.items():
        if part in name and gigabytes > 70:
            return kind
    raise ConfigError(
        f"of the GPU here, {name} with {gigabytes:.0f} GB, there is no device profile: measure it with `rlcore plan "
        "--calibrate`, or name one of these with cluster.device: " + ", ".join(shipped())
    )
