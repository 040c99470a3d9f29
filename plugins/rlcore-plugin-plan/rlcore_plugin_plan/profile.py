"""Device profiles: every constant of the cost models with its source, in one YAML file for each kind of device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rlcore import ConfigError, did_you_mean

STORED = Path("~/.cache/rlcore/profiles")
"""Folder of the profiles that `rlcore plan --calibrate` writes; plan.device names them."""


@dataclass(frozen=True)
class Profile:
    """A kind of device and its machines. Rates are those of one device, per second.

    Device: `memory` (bytes; a plan uses the share `usable`); `flops_bf16`, `flops_fp32` (peak of matrix products);
    `training`, `forward`, `decoding` (share of that peak that large products reach in this work); `bandwidth` (bytes
    from and to memory; the share `bandwidth_share` is reached); `dollars` (price of an hour); `cpu` (devices are
    processor cores).
    Links: `link` (bytes from a device to another of its machine); `network` (bytes from a machine to another);
    `link_latency`, `network_latency` (seconds); `overlap` (share of compute time that hides gathers of sharded
    weights).
    Host seconds: `layer_seconds` (one layer's forward); `decode_layer_seconds` (one layer of a decoding step);
    `decode_step_seconds` and `decode_row_seconds` (each decoding step, and each row in it); `optimizer_seconds` (an
    optimizer step); `pipeline_seconds` (set-up of a pipeline's step, and each micro-batch on each stage).
    Run: `call_seconds` (from the controller's call to the workers and back); `transition_seconds` (least time of a
    change from training to generation).
    Machines: `per_machine` (devices of a machine); `node` (the resource that marks such machines in Ray).
    """

    name: str
    per_machine: int
    memory: float
    usable: float
    flops_bf16: float
    flops_fp32: float
    training: float
    forward: float
    decoding: float
    bandwidth: float
    bandwidth_share: float
    link: float
    link_latency: float
    network: float
    network_latency: float
    overlap: float
    layer_seconds: float
    decode_layer_seconds: float
    decode_step_seconds: float
    decode_row_seconds: float
    optimizer_seconds: float
    call_seconds: float
    transition_seconds: float
    pipeline_seconds: float
    dollars: float
    node: str | None = None
    cpu: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def flops(self, dtype_bytes: int) -> float:
        """Peak FLOP/s of matrix products with elements of `dtype_bytes` bytes."""
        return self.flops_bf16 if dtype_bytes == 2 else self.flops_fp32

    @property
    def memory_rate(self) -> float:
        """Reached bytes/s from and to memory."""
        return self.bandwidth * self.bandwidth_share

    def together(self, device: float, host: float) -> float:
        """Seconds of a device's work and its host's: a GPU and its host overlap, a core does both in turn."""
        return device + host if self.cpu else max(device, host)

    def gather_seconds(self, nbytes: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather of `nbytes` in total over `ranks` devices that are `stride` apart.

        A ring: each device sends (ranks - 1) / ranks of the bytes (Thakur, Rabenseifner, Gropp 2005, section 4.1). A
        group inside a machine uses its links. Otherwise the machine's network is the bottleneck, and all groups that
        begin in the machine share it.
        """
        if ranks == 1 or nbytes == 0:
            return 0.0
        volume = nbytes * (ranks - 1) / ranks
        if ranks * stride <= self.per_machine:
            return volume / self.link + self.link_latency * math.ceil(math.log2(ranks))
        inside = max(1, min(ranks, self.per_machine // stride))
        rate = min(self.link, self.network * inside / self.per_machine)
        return volume / rate + self.network_latency * math.ceil(math.log2(ranks))

    def reduce_seconds(self, nbytes: float, ranks: int, stride: int) -> float:
        """Seconds of an all-reduce of `nbytes` over `ranks` devices: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(nbytes, ranks, stride)

    def send_seconds(self, nbytes: float, stride: int) -> float:
        """Seconds to send `nbytes` to the device that is `stride` further."""
        if stride < self.per_machine:
            return nbytes / self.link + self.link_latency
        return nbytes / min(self.link, self.network / self.per_machine) + self.network_latency


def load(name: str) -> Profile:
    """Return a shipped or stored profile by name, or the profile in a YAML file.

    Raises ConfigError for an unknown name, and for a file that is not a profile.
    """
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        known = {**shipped(), **stored()}
        if name not in known:
            raise ConfigError(
                f"plan.device = {name!r} is not a device profile.{did_you_mean(name, known)} Available: "
                f"{', '.join(known)}; measure this machine with `rlcore plan --calibrate`, or name a file NAME.yaml"
            )
        path = known[name]
    try:
        return parse(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"the device profile {path} cannot be read: {error}") from error


def shipped() -> dict[str, Path]:
    """Return the planner's own profiles, by name."""
    folder = Path(str(files("rlcore_plugin_plan").joinpath("profiles")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def stored() -> dict[str, Path]:
    """Return the profiles measured on this machine, by name."""
    return {path.stem: path for path in sorted(STORED.expanduser().glob("*.yaml"))}


def parse(values: Any, where: str) -> Profile:
    """Build a profile from `{name, figures: {NAME: {value, source}}}`; `node` and `cpu` are optional.

    Raises ConfigError for an unknown or missing figure, one without a source, and one that is not a number of at
    least 0 (per_machine, memory, flops_fp32, bandwidth and link: above 0).
    """
    if not isinstance(values, Mapping) or not isinstance(values.get("figures"), Mapping):
        raise ConfigError(f"{where} is not a device profile: it must hold `name` and `figures`")
    figures = values["figures"]
    wanted = [each.name for each in fields(Profile) if each.name not in ("name", "node", "cpu", "sources")]
    _check_figures(figures, wanted, where)
    numbers = {name: figures[name]["value"] for name in wanted}
    return Profile(
        name=str(values.get("name") or Path(where).stem),
        node=values.get("node"),
        cpu=bool(values.get("cpu", False)),
        sources={name: str(figures[name]["source"]) for name in wanted},
        **{**numbers, "per_machine": int(numbers["per_machine"])},
    )


def _check_figures(figures: Mapping[str, Any], wanted: Sequence[str], where: str) -> None:
    for name, figure in figures.items():
        if name not in wanted:
            raise ConfigError(f"{where}: unknown figure {name!r}.{did_you_mean(name, wanted)}")
        if not isinstance(figure, Mapping) or set(figure) != {"value", "source"} or not figure["source"]:
            raise ConfigError(f"{where}: {name} = {figure!r} must be {{value: NUMBER, source: TEXT}}")
        number = figure["value"]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ConfigError(f"{where}: {name} = {number!r} must be a number of at least 0")
    if missing := [name for name in wanted if name not in figures]:
        raise ConfigError(f"{where} lacks the figures {', '.join(missing)}")
    zero = [n for n in ("per_machine", "memory", "flops_fp32", "bandwidth", "link") if figures[n]["value"] <= 0]
    if zero:
        raise ConfigError(f"{where}: {zero[0]} must be above 0")


def dump(profile: Profile) -> str:
    """Return the YAML that `parse` reads."""
    figures = {name: {"value": getattr(profile, name), "source": text} for name, text in profile.sources.items()}
    return yaml.safe_dump(
        {"name": profile.name, "node": profile.node, "cpu": profile.cpu, "figures": figures}, sort_keys=False, width=110
    )
