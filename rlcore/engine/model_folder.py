"""Writes a model as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlcore.config import ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.errors import CheckpointError
from rlcore.model_folder import read_tokenizer


def write_model_folder(
    hf: Any, weights: Iterable[tuple[str, Tensor]], model: ModelConfig, folder: Path, ranks: Ranks
) -> None:
    """Write a folder that transformers' `from_pretrained` opens: config, weights, and the tokenizer of `model`.

    `weights` are whole parameters by their Hugging Face names, in the dtype to write. Every rank iterates over them,
    because gathering may be collective. Rank 0 keeps them in main memory and writes. Raises CheckpointError for a
    folder that cannot be written.
    """
    # Every rank draws every tensor: gathering is a collective. Only rank 0 needs the memory for all of them.
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in weights if ranks.rank == 0}
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / 'model.safetensors'} cannot be written: {error}") from error
        tokenizer = read_tokenizer(model)
        if hasattr(hf, "score") and hf.config.pad_token_id is None:
            hf.config.pad_token_id = tokenizer.pad_token_id  # transformers needs it to find a row's last token
        hf.config.save_pretrained(folder)
        if getattr(hf, "generation_config", None) is not None:
            hf.generation_config.save_pretrained(folder)
        if model.chat_template is not None:
            tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder)
    # No rank goes on before the folder is complete.
    ranks.gather(None)
