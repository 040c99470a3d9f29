"""Weights, optimizer and random state to and from disk: safetensors and JSON, whole tensors, any number of ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.assets import model_path
from rlcore.config import ModelConfig
from rlcore.engine.ranks import Ranks
from rlcore.errors import CheckpointError

if TYPE_CHECKING:
    from rlcore.engine.train.parameters import Parameters

ENGINE_STATE = "engine.json"
"""The file of a saved state that is written last."""


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered from all ranks (collective), or a plain one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether only a part of the tensor is on this rank."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a sharded tensor, or a plain one as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def save_pretrained(
    hf: Any, full: Iterator[tuple[str, Tensor]], model: ModelConfig, folder: Path, ranks: Ranks
) -> None:
    """Write a folder that transformers' `from_pretrained` opens, from whole parameters one at a time.

    Every rank has to go through `full`, which gathers them; rank 0 keeps them, in main memory, and writes.
    """
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in full if ranks.rank == 0}
    if ranks.rank == 0:
        from transformers import AutoTokenizer

        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "model.safetensors", weights)
        tokenizer = AutoTokenizer.from_pretrained(
            model_path(model.path), trust_remote_code=model.trust_remote_code, local_files_only=True
        )
        if hasattr(hf, "score") and hf.config.pad_token_id is None:
            hf.config.pad_token_id = tokenizer.pad_token_id  # by which transformers finds the last token of a row
        hf.config.save_pretrained(folder)
        if getattr(hf, "generation_config", None) is not None:
            hf.generation_config.save_pretrained(folder)
        if model.chat_template is not None:
            tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder)
    ranks.gather(None)


def load_weights(parameters: Parameters, folder: Path) -> None:
    """Copy this rank's part of the weights of a folder that `save_pretrained` wrote.

    Raises CheckpointError when names or shapes differ.
    """
    saved = _read(folder / "model.safetensors")
    shapes = parameters.shapes
    if set(saved) != set(shapes):
        raise CheckpointError(
            f"{folder / 'model.safetensors'} does not fit the model: "
            f"missing {sorted(set(shapes) - set(saved))[:5]}, unknown {sorted(set(saved) - set(shapes))[:5]}"
        )
    with torch.no_grad():
        for name, parameter in parameters.here():
            if saved[name].shape != shapes[name]:
                raise CheckpointError(
                    f"{folder}: {name} has shape {tuple(saved[name].shape)}, the model's is {shapes[name]}"
                )
            local(parameter).copy_(parameters.part(name, saved[name]))


def save_engine_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer | None, version: int, folder: Path, ranks: Ranks
) -> None:
    """Write optimizer moments (whole), the version, and every rank's random state."""
    moments: dict[str, Tensor] = {}
    steps: set[float] = set()
    if optimizer is not None:
        held = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.here()}
        for key in sorted({key for state in held.values() for key in state} - {"step"}):
            for name, full in parameters.whole({name: state[key] for name, state in held.items()}):
                if ranks.rank == 0:
                    moments[f"{key}.{name}"] = full.cpu().clone()
        steps = {float(state["step"]) for state in held.values() if "step" in state}
    random_states = ranks.gather(random_state())
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if moments:
            _write(folder / "optimizer.safetensors", moments)
        (folder / ENGINE_STATE).write_text(json.dumps({"version": version, "optimizer_steps": sorted(steps), "random": random_states}))
    ranks.gather(None)


def load_engine_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer | None, folder: Path, ranks: Ranks
) -> int:
    """Take back what `save_engine_state` wrote and return the version.

    A rank that did not exist when the state was saved keeps its own random state. Raises CheckpointError for files that
    are missing or do not fit.
    """
    try:
        state = json.loads((folder / ENGINE_STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'engine.json'} cannot be read: {error}") from error
    if optimizer is not None and (folder / "optimizer.safetensors").exists():
        moments = _read(folder / "optimizer.safetensors")
        with torch.no_grad():
            for name, parameter in parameters.here():
                mine = {}
                for key, value in moments.items():
                    kind, _, of = key.partition(".")
                    if of == name:
                        mine[kind] = torch.zeros_like(parameter)
                        local(mine[kind]).copy_(parameters.part(name, value))
                if mine:
                    mine["step"] = torch.tensor(state["optimizer_steps"][0], device=parameter.device)
                    optimizer.state[parameter] = mine
    if ranks.rank < len(state["random"]):
        set_random_state(state["random"][ranks.rank])
    return int(state["version"])


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def random_state() -> dict[str, Any]:
    """Return the state of this process's global random generators as values that JSON can hold."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, internal, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Take back what `random_state` returned."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
