"""Saves and loads sharded tensors with torch.distributed.checkpoint, only in safetensors files.

Each rank writes its shards to its own file, and reads its shards from all files, under any layout. A file's header is
JSON and describes its shards. So loading cannot run code, unlike torch's default reader, which unpickles a file
`.metadata`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlcore.engine.collectives import Ranks
from rlcore.errors import CheckpointError


def save(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write plain tensors and DTensors into `folder`, each rank its own shards; replicated tensors are written once."""
    from torch.distributed.checkpoint import (
        hf_storage,
        state_dict_saver,
    )  # imported here, as it takes a second that no start should wait for

    writer = hf_storage.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    _run(state_dict_saver.save, "written", tensors, folder, ranks, storage_writer=writer)


def load(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill `tensors`, in place, from files of `save` or from a Hugging Face folder.

    Raises CheckpointError for files that cannot be read and for missing names.
    """
    from torch.distributed.checkpoint import hf_storage, state_dict_loader

    reader = hf_storage.HuggingFaceStorageReader(str(folder))
    _run(state_dict_loader.load, "read", tensors, folder, ranks, storage_reader=reader)


def _run(function: Any, done: str, tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks, **how: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as intended with one rank
            function(dict(tensors), no_dist=ranks.world_size == 1, **how)
    except (CheckpointException, OSError, SafetensorError, KeyError, ValueError) as error:
        causes = getattr(error, "failures", None)
        cause = next(iter(causes.values()))[0] if causes else error
        raise CheckpointError(f"{folder} cannot be {done}: {cause}") from error


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a safetensors file. Raises CheckpointError when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
