"""Writes a model as a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlcore.config import ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.errors import CheckpointError, ConfigError
from rlcore.model_folder import model_path, read_tokenizer

GENERATION = "generation_config.json"


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
        _write_settings(hf, model, folder)
    # No rank goes on before the folder is complete.
    ranks.gather(None)


def check_writable(hf: Any, model: ModelConfig, ranks: Ranks) -> None:
    """Write everything but the weights once, to a folder that is deleted, so that no run is lost at its first save.

    Raises ConfigError for a config or a tokenizer that transformers reads but does not write.
    """
    if ranks.rank != 0:
        return
    with tempfile.TemporaryDirectory(prefix="rlcore-model-") as folder:
        try:
            _write_settings(hf, model, Path(folder))
        except Exception as error:  # of transformers, or of code that comes with the model's folder
            raise ConfigError(
                f"model folder {model.path!r} loads, but its config or tokenizer cannot be written again, so that a "
                f"checkpoint would fail: {type(error).__name__}: {error}. Mend its config.json or tokenizer_config.json"
            ) from error


def _write_settings(hf: Any, model: ModelConfig, folder: Path) -> None:
    tokenizer = read_tokenizer(model)
    if hasattr(hf, "score") and hf.config.pad_token_id is None:
        hf.config.pad_token_id = tokenizer.pad_token_id  # transformers needs it to find a row's last token
    # Not save_pretrained, which refuses what many published folders hold: settings of generation.
    hf.config.to_json_file(folder / "config.json")
    if model.trust_remote_code:  # which config.json names
        for code in model_path(model.path, "tokenizer", code=True).glob("*.py"):
            shutil.copyfile(code, folder / code.name)
    given = model_path(model.path, "tokenizer") / GENERATION
    if given.is_file():
        shutil.copyfile(given, folder / GENERATION)
    if model.chat_template is not None:
        tokenizer.chat_template = Path(model.chat_template).expanduser().read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
