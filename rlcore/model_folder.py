"""A model's Hugging Face folder: its path, config, tokenizer and precision."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.assets import TINY
from rlcore.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def model_path(path: str) -> Path:
    """Return the folder of `model.path`: the shipped model for `tiny`, else the path itself with `~` expanded."""
    return TINY if path == "tiny" else Path(path).expanduser()


def loading_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options of every `from_pretrained`: no download; code of the folder only if the config allows it."""
    return {"trust_remote_code": model.trust_remote_code, "local_files_only": True}


@cache
def load_model_config(path: str, trust_remote_code: bool) -> Any:
    """Return the transformers config of a model folder (`tiny`: the shipped one). Reads config.json and no weights.

    All callers share the returned object and must not change it. Raises OSError or ValueError for a folder whose
    config.json cannot be read.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path(path), trust_remote_code=trust_remote_code, local_files_only=True)


def read_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder, unchanged. Raises the errors of transformers, such as OSError.

    For prompts use `rlcore.data.chat.load_tokenizer`, which checks it.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(model.path), **loading_options(model))


def model_dtype(model: ModelConfig) -> torch.dtype:
    """Return the precision of a model's forward pass as a torch dtype."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[model.dtype]
