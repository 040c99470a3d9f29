"""A model's Hugging Face folder: its path, config, tokenizer and precision."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.assets import TINY
from rlcore.config import Config, ModelConfig
from rlcore.errors import ConfigError

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


def positions(model: ModelConfig) -> int | None:
    """Return the number of tokens that a model can read, by its config.json; None where it names no limit.

    Scaled rotary positions count as scaled.
    """
    config = load_model_config(model.path, model.trust_remote_code).get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if limit is None or not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * (original or limit)))


def check_positions(config: Config, longest: int) -> None:
    """Raise ConfigError when a prompt of `longest` tokens and a response do not fit into the model's positions."""
    limit, response = positions(config.model), config.rollout.response_len
    if limit is not None and longest + response > limit:
        raise ConfigError(
            f"model.path={config.model.path} has {limit} positions, but the longest prompt has {longest} tokens "
            f"(data.prompt_len={config.data.prompt_len}) and a response up to rollout.response_len={response}, which "
            f"is {longest + response}; lower rollout.response_len to {max(limit - longest, 0)}, or data.prompt_len"
        )


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
