"""The devices to plan for: from `plan.device` and `plan.gpus`, or detected."""

from __future__ import annotations

import os

from rlcore import Config, ConfigError
from rlcore.planning import accelerators
from rlcore_plugin_plan.config import PlanConfig
from rlcore_plugin_plan.problem import Devices
from rlcore_plugin_plan.profile import load, shipped, stored

HERE = "here"
"""Default name of the profile that `rlcore plan --calibrate` writes."""


def devices(config: Config) -> tuple[Devices, ...]:
    """Return the devices of each kind to plan for. `plan.device` is NAME, or NAME:COUNT joined by + for several kinds.

    The in-process executor has one device. Raises ConfigError for an unknown kind, for counts that contradict each
    other, and for a kind without a count.
    """
    asked = config.section(PlanConfig)
    if asked.device is None:
        found = _found_here(config)
        counts: dict[str, int | None] = {**found} if asked.gpus is None else {next(iter(found)): asked.gpus}
    else:
        counts = _parsed(asked.device)
        if list(counts.values()) == [None]:
            (name,) = counts
            counts[name] = _found_here(config).get(name) if asked.gpus is None else asked.gpus
    kinds = tuple(_devices(name, count, asked) for name, count in counts.items())
    total = sum(each.count for each in kinds)
    if asked.gpus not in (None, total):
        raise ConfigError(
            f"plan.gpus = {asked.gpus}, but plan.device = {asked.device} names {total} devices: leave out one of them"
        )
    if len({each.profile.cpu for each in kinds}) > 1:
        raise ConfigError(f"plan.device = {asked.device}: processor cores and GPUs cannot be planned together")
    return kinds


def _devices(name: str, count: int | None, asked: PlanConfig) -> Devices:
    profile = load(name)
    if count is None:
        raise ConfigError(
            f"plan.device = {asked.device}: this machine has no {name} to count; give a number, as plan.gpus=8 or "
            f"plan.device={name}:8"
        )
    return Devices(profile, count)


def _parsed(text: str) -> dict[str, int | None]:
    """Read NAME or NAME:COUNT+NAME:COUNT."""
    kinds: dict[str, int | None] = {}
    several = "+" in text
    for part in text.split("+"):
        name, colon, count = part.partition(":")
        if (colon and not (count.isdigit() and int(count) > 0)) or not name or (several and not colon) or name in kinds:
            raise ConfigError(
                f"plan.device = {text!r} must be NAME, or NAME:COUNT with counts from 1 and each name once, as "
                "h100:8+a100-80g:16"
            )
        kinds[name] = int(count) if colon else None
    return kinds


def _found_here(config: Config) -> dict[str, int]:
    """Return the number of detected devices by profile; 1 for the in-process executor."""
    found = _found_on_cluster(config) if config.cluster.address is not None else _found_on_machine(config)
    return dict.fromkeys(found, 1) if config.cluster.executor == "in_process" else found


def _found_on_cluster(config: Config) -> dict[str, int]:
    """Return the devices of the Ray cluster at `cluster.address`, by profile."""
    kinds, cores = accelerators(config)
    known = {load(name).node: name for name in shipped()}
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(
            f"the cluster at {config.cluster.address} has {unknown[0]}, which has no device profile: measure "
            "it there with `rlcore plan --calibrate`, and name the file with plan.device=FILE.yaml"
        )
    if kinds:
        return {known[kind]: count for kind, count in kinds.items()}
    return {_cpu(): max(1, cores // config.cluster.cpus_per_worker)}


def _found_on_machine(config: Config) -> dict[str, int]:
    """Return the devices of this machine, by profile."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
        kind = HERE if HERE in stored() and not load(HERE).cpu else _named(name, gigabytes)
        return {kind: torch.cuda.device_count()}
    return {_cpu(): max(1, len(os.sched_getaffinity(0)) // config.cluster.cpus_per_worker)}


def _cpu() -> str:
    return HERE if HERE in stored() and load(HERE).cpu else "cpu"


def _named(name: str, gigabytes: float) -> str:
    kinds = {"A100": "a100-80g", "H100": "h100", "H200": "h200"}
    for part, kind in kinds.items():
        if part in name and gigabytes > 70:
            return kind
    raise ConfigError(
        f"this machine's GPU has no device profile: {name} with {gigabytes:.0f} GB. Measure it with `rlcore plan "
        f"--calibrate`, or choose a profile with plan.device: {', '.join(shipped())}"
    )
