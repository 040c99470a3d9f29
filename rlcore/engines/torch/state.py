"""Saves and loads weights, optimizer and random state: safetensors and JSON, under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.adapter_folder import WEIGHTS, file_name
from rlcore.engine.collectives import Ranks
from rlcore.engine.generators import random_state, set_random_state
from rlcore.engine.train import ENGINE_STATE
from rlcore.engines.torch import sharded_files
from rlcore.errors import CheckpointError

if TYPE_CHECKING:
    from rlcore.engines.torch.parameters import Parameters

MOMENTS = "optimizer"
"""Folder of the optimizer's moments in a saved state; they are named exp_avg.NAME and exp_avg_sq.NAME."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a shard of the tensor."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def load_weights(parameters: Parameters, folder: Path, ranks: Ranks, *, adapter: bool) -> None:
    """Copy this rank's shards of the weights from a folder that `save_pretrained` wrote.

    adapter: the folder holds an adapter, and only its weights are read. Raises CheckpointError when names or shapes
    differ.
    """
    names = {name: file_name(name) for name in parameters.trained_names} if adapter else {}
    names = names or {name: name for name in parameters.shapes}
    file = folder / (WEIGHTS if adapter else "model.safetensors")
    saved, wanted = sharded_files.shapes(file), {names[name]: parameters.shapes[name] for name in names}
    if set(saved) != set(wanted):
        raise CheckpointError(
            f"{file} does not fit the model: "
            f"missing {sorted(set(wanted) - set(saved))[:5]}, unknown {sorted(set(saved) - set(wanted))[:5]}"
        )
    for name, shape in wanted.items():
        if saved[name] != shape:
            raise CheckpointError(f"{folder}: {name} has shape {saved[name]}, the model's is {shape}")
    with torch.no_grad():
        local = dict(parameters.named_local())
        sharded_files.load({names[name]: local[name].detach() for name in names if name in local}, folder, ranks)


def save_engine_state(
    parameters: Parameters,
    optimizer: torch.optim.Optimizer | None,
    version: int,
    folder: Path,
    ranks: Ranks,
    base: str | None = None,
) -> None:
    """Write the optimizer's moments (each rank its shards), the version, and the random state of every rank.

    base: the checksum of the weights beneath an adapter.
    """
    moments: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.named_local():
        for key, value in states.get(parameter, {}).items():
            if key == "step":
                steps[name] = float(value)
            else:
                moments[f"{key}.{name}"] = value
    folder.mkdir(parents=True, exist_ok=True)
    everyone = ranks.gather((random_state(), steps))
    # All ranks or none: saving is a collective, and a rank of another stage may have no moments.
    if any(its for _, its in everyone):
        sharded_files.save(moments, folder / MOMENTS, ranks)
    if ranks.rank == 0:
        merged: dict[str, float] = {}
        for _, of_rank in everyone:
            merged |= of_rank
        written = {"version": version, "steps": merged, "random": [state for state, _ in everyone], "base": base}
        (folder / ENGINE_STATE).write_text(json.dumps(written))
    # No rank goes on before ENGINE_STATE marks the state as complete.
    ranks.gather(None)


def check_base(folder: Path, base: str | None, model: str) -> None:
    """Raise CheckpointError when a saved adapter was trained on other weights than those of `model.path`.

    base: the checksum of these weights; None without an adapter.
    """
    try:
        saved = json.loads((folder / ENGINE_STATE).read_text()).get("base")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / ENGINE_STATE} cannot be read: {type(error).__name__}: {error}") from error
    if saved != base:
        raise CheckpointError(
            f"{folder} holds an adapter that was trained on other weights than those of model.path={model}; give the "
            "model with which the run began"
            if saved and base
            else f"{folder} was saved {'with' if saved else 'without'} an adapter, and the run is "
            f"{'with' if base else 'without'} one; give the run's own keys of model.lora"
        )


def load_engine_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer | None, folder: Path, ranks: Ranks
) -> int:
    """Read the files of `save_engine_state` and return the version.

    A rank that did not exist when the state was saved keeps its own random state. Raises CheckpointError for files that
    are missing or do not fit.
    """
    try:
        state = json.loads((folder / ENGINE_STATE).read_text())
        version, steps, random_states = int(state["version"]), dict(state["steps"]), list(state["random"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder / ENGINE_STATE} cannot be read: {reason}") from error
    # A state saved before the first step has no moments; the optimizer must not keep its own.
    if optimizer is not None:
        optimizer.state.clear()
    if optimizer is not None and steps:
        moments: dict[str, Tensor] = {}
        for name, parameter in parameters.named_local():
            if name in steps:
                mine = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                moments |= {f"{key}.{name}": value for key, value in mine.items()}
                # The fused optimizer keeps its step on the parameter's device.
                mine["step"] = torch.tensor(steps[name], device=parameter.device)
                optimizer.state[parameter] = mine
        sharded_files.load(moments, folder / MOMENTS, ranks)
    if ranks.rank < len(random_states):
        set_random_state(random_states[ranks.rank])
    return version
