"""Writes a model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.adapter_folder import SETTINGS, WEIGHTS
from rlcore.config import ModelConfig
from rlcore.engine.adapter import adapted
from rlcore.engine.collectives import Ranks
from rlcore.errors import CheckpointError, ConfigError
from rlcore.hub import is_pinned
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
    _write(weights, folder / "model.safetensors", ranks, lambda: _write_settings(hf, model, folder))


def write_adapter_folder(
    given: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], model: ModelConfig, folder: Path, ranks: Ranks
) -> None:
    """Write a folder that the package peft opens: the adapter's settings and weights, and the tokenizer of `model`.

    `given`: the values of adapter_config.json, by `adapter_settings`. `weights` are whole, by their names in the file.
    See `write_model_folder`.
    """

    def settings() -> None:
        written = json.dumps(given, indent=2)
        (folder / SETTINGS).write_text(written + "\n", encoding="utf-8")
        _write_tokenizer(read_tokenizer(model), model, folder)

    _write(weights, folder / WEIGHTS, ranks, settings)


def adapter_settings(hf: Any, model: ModelConfig) -> dict[str, Any]:
    """Return the values of adapter_config.json for a model with adapted layers, before it is split into stages."""
    layers = adapted(hf)
    first = next(iter(layers.values()))
    repo, _, commit = model.path.partition("@") if is_pinned(model.path) else (None, "", None)
    has_score = hasattr(hf, "score")
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_score else "CAUSAL_LM",
        "base_model_name_or_path": repo or str(model_path(model.path, "config").resolve()),
        "revision": commit,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "lora_dropout": first.dropout,
        "target_modules": _target_modules(hf, layers),
        "modules_to_save": ["score"] if has_score else None,
        "bias": "none",
        "inference_mode": True,
    }


def _target_modules(hf: Any, layers: Iterable[str]) -> list[str]:
    """Return the last words of the adapted layers' names, or whole names where other layers have these words too."""
    layers = set(layers)
    words = {name.rpartition(".")[2] for name in layers}
    others = [name for name, each in hf.named_modules() if isinstance(each, nn.Linear) and name not in layers]
    return sorted(layers if any(name.rpartition(".")[2] in words for name in others) else words)


def _write(weights: Iterable[tuple[str, Tensor]], file: Path, ranks: Ranks, settings: Callable[[], None]) -> None:
    # Every rank draws every tensor: gathering is a collective. Only rank 0 needs the memory for all of them.
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in weights if ranks.rank == 0}
    if ranks.rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(kept, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be written: {error}") from error
        settings()
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
    _write_tokenizer(tokenizer, model, folder)


def _write_tokenizer(tokenizer: Any, model: ModelConfig, folder: Path) -> None:
    if model.chat_template is not None:
        tokenizer.chat_template = Path(model.chat_template).expanduser().read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
