"""The folder of a LoRA adapter, in peft's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Begins the name of each tensor in the file."""
FILE_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
"""The names in the file of an adapted layer's matrices."""
ALLOWED: Mapping[str, Sequence[Any]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([], ["score"], ["classifier", "score"]),
    "target_parameters": ([],),
    "trainable_token_indices": ([],),
    "layers_to_transform": ([],),
    "exclude_modules": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "arrow_config": ({},),
    "loftq_config": ({},),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the base model, too
}
"""Values of settings with which an adapter is what rlcore computes; a setting that is absent or null has the first."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / SETTINGS).is_file() and not (folder / "config.json").is_file()


def file_name(parameter: str) -> str:
    """Return the name in the file of an adapted layer's matrix, or of a head's parameter."""
    layer, _, kind = parameter.rpartition(".")
    return f"{PREFIX}{layer}.{FILE_NAMES.get(kind, kind)}"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter on disk. Reading a property raises ConfigError for a setting that rlcore does not compute."""

    path: Path

    @staticmethod
    def of(path: str) -> AdapterFolder:
        """Return the adapter of a folder after checking its settings. Raises ConfigError; reads no weights."""
        adapter = AdapterFolder(Path(path).expanduser())
        if not adapter.path.is_dir():
            raise ConfigError(
                f"model.lora.path={path} does not exist; give the folder of an adapter, with {SETTINGS} and {WEIGHTS}"
            )
        for name in (SETTINGS, WEIGHTS):
            if not (adapter.path / name).is_file():
                raise ConfigError(f"model.lora.path={path} has no {name}, so it is not the folder of a LoRA adapter")
        adapter.check()
        return adapter

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of adapter_config.json."""
        try:
            read: dict[str, Any] = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
            return dict(read)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.path / SETTINGS} cannot be read: {error}") from error

    def check(self) -> None:
        """Raise ConfigError for a setting of peft that rlcore does not compute, and for a wrong rank or scale."""
        for name, allowed in ALLOWED.items():
            value = self.settings.get(name)
            if value is not None and value not in allowed:
                known = " or ".join(json.dumps(each) for each in allowed)
                raise ConfigError(f"{self.path / SETTINGS}: {name} is {json.dumps(value)}; rlcore computes {known}")
        _ = self.rank, self.scale, self.targets

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        rank = self.settings.get("r")
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"{self.path / SETTINGS}: r is {rank!r}, and must be a whole number from 1")
        return rank

    @property
    def scale(self) -> float:
        """The factor of B A."""
        alpha = self.settings.get("lora_alpha")
        if not isinstance(alpha, int | float):
            raise ConfigError(f"{self.path / SETTINGS}: lora_alpha is {alpha!r}, and must be a number")
        return alpha / (math.sqrt(self.rank) if self.settings.get("use_rslora") else self.rank)

    @property
    def targets(self) -> list[str] | Literal["all-linear"]:
        """The adapted layers, as `model.lora.targets`."""
        found = self.settings.get("target_modules")
        if found == "all-linear":
            return "all-linear"
        if not isinstance(found, list) or not found:
            raise ConfigError(
                f"{self.path / SETTINGS}: target_modules is {found!r}; rlcore reads a list of names, or all-linear"
            )
        return sorted(found)

    @property
    def has_score(self) -> bool:
        """Whether it holds the head of a critic or reward model besides."""
        return bool(self.settings.get("modules_to_save"))

    @property
    def base(self) -> str:
        """The model that it adapts, as a value of `model.path`: a folder, or a name on the hub with its commit."""
        base, revision = self.settings.get("base_model_name_or_path"), self.settings.get("revision")
        if not isinstance(base, str) or not base:
            raise ConfigError(
                f"{self.path / SETTINGS} does not name its base model (base_model_name_or_path); give both: "
                f"model.path=BASE model.lora.path={self.path}"
            )
        return f"{base}@{revision}" if revision else base

    def read(self) -> dict[str, Tensor]:
        """Return the tensors by their names in the file. Raises ConfigError when they cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path / WEIGHTS} cannot be read: {error}") from error

    def tensor(self, tensors: Mapping[str, Tensor], parameter: str, shape: Sequence[int]) -> Tensor:
        """Return the tensor of a parameter. Raises ConfigError if it is missing, does not fit or is not finite."""
        name = file_name(parameter)
        found = tensors.get(name)
        if found is None or tuple(found.shape) != tuple(shape) or not bool(found.isfinite().all()):
            fault = "is missing"
            if found is not None:
                wrong = tuple(found.shape) != tuple(shape)
                fault = f"has the shape {list(found.shape)}, not {list(shape)}" if wrong else "is NaN or infinite"
            raise ConfigError(f"{self.path / WEIGHTS} does not fit the model: {name} {fault}")
        return found

    def check_read(self, tensors: Mapping[str, Tensor], heads: Collection[str], layers: Collection[str]) -> None:
        """Raise ConfigError for tensors that belong to none of the adapted layers and heads."""
        expected = {file_name(f"{layer}.{part}") for layer in layers for part in FILE_NAMES}
        expected |= {file_name(head) for head in heads}
        if unused := sorted(set(tensors) - expected):
            raise ConfigError(
                f"{self.path / WEIGHTS} does not fit the model: no layer of it has {', '.join(unused[:3])}"
            )
