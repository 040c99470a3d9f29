"""A model's Hugging Face folder: its path, config, tokenizer and precision."""

from __future__ import annotations

import datetime
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.adapter_folder import is_adapter
from rlcore.assets import TINY
from rlcore.config import Config, LoraConfig, ModelConfig
from rlcore.errors import ConfigError
from rlcore.hub import Need, is_pinned
from rlcore.hub import model_folder as hub_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def model_path(path: str, need: Need = "weights", *, code: bool = False) -> Path:
    """Return the folder of `model.path`: the shipped model for `tiny`, else the path itself with `~` expanded.

    A name on the hub, which a config has as ORG/NAME@COMMIT, gives the folder in huggingface_hub's cache, after
    fetching the files that it lacks: those that the reader needs, and with `code` (model.trust_remote_code) the
    model's *.py files. Raises ConfigError when they cannot be fetched.
    """
    if path == "tiny":
        return TINY
    return hub_folder(path, need, code=code) if is_pinned(path) else Path(path).expanduser()


def with_saved_actor(config: Config, folder: Path) -> Config:
    """Return the config whose model is the actor's of a checkpoint: the folder's, or the run's own with its adapter."""
    saved, own = str(folder.resolve()), dict(config.roles)
    if "actor" in own:
        own["actor"] = replace(own["actor"], lora={})  # by which the run's actor started
    if is_adapter(folder):
        return replace(config, model=replace(config.model, lora=LoraConfig(path=saved)), roles=own)
    return replace(config, model=replace(config.model, path=saved, lora=LoraConfig()), roles=own)


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

    folder = model_path(path, "config", code=trust_remote_code)
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def load_model(model: ModelConfig, *, scores: bool | None = None) -> Any:
    """Return the transformers model of a folder in fp32, for commands that write it again.

    scores: a sequence-classification model with one label, and not a causal language model; None: as config.json says.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()  # it warns of a head that an adapter brings
    config = load_model_config(model.path, model.trust_remote_code)
    if scores is None:
        scores = any("ForSequenceClassification" in name for name in config.architectures or ())
    kind: Any = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    options = {**loading_options(model), **({"num_labels": 1} if scores else {})}
    hf = kind.from_pretrained(model_path(model.path, code=model.trust_remote_code), dtype="float32", **options)
    hf.config.architectures = [type(hf).__name__]
    return hf


def has_sdpa(model: ModelConfig) -> bool:
    """Whether transformers has sdpa attention for a model's family; True for code of the folder, which may have it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(load_model_config(model.path, model.trust_remote_code)), None)
    return bool(getattr(family, "_supports_sdpa", True))


def router_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options of `from_pretrained` that keep a mixture of experts from returning its router's logits.

    A config.json may ask for them. They serve a loss that no algorithm has, and transformers fails on them in decoding.
    """
    config = load_model_config(model.path, model.trust_remote_code)
    return {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}


def positions(model: ModelConfig) -> int | None:
    """Return the number of tokens that a model can read, by its config.json; None where it names no limit.

    Scaled rotary positions count as scaled.
    """
    config = load_model_config(model.path, model.trust_remote_code).get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    scaling = _rope(config)
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if limit is None or not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * (original or limit)))


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _same_rope(model: ModelConfig) -> tuple[str, int] | None:
    """Return the kind of a rotary scaling by length, and the tokens up to which rows are scaled alike; else None."""
    config = load_model_config(model.path, model.trust_remote_code).get_text_config()
    scaling = _rope(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("longrope", "su", "dynamic"):
        return None
    original = scaling.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", config.max_position_embeddings
    )
    return str(kind), int(original)


def check_positions(config: Config, longest: int) -> None:
    """Raise ConfigError when a prompt of `longest` tokens and a response do not fit into the model's positions.

    Also when they may exceed the length at which a model changes its rotary scaling: rows of both kinds in one forward
    would all get one scaling, and their log-probs would depend on the rows beside them.
    """
    limit, response = positions(config.model), config.rollout.response_len
    if (by_length := _same_rope(config.model)) and longest + response > by_length[1]:
        raise ConfigError(
            f"model.path={config.model.path} uses another rotary scaling ({by_length[0]}) for rows of more than "
            f"{by_length[1]} tokens; the longest prompt has {longest} tokens and a response up to "
            f"rollout.response_len={response}, which is {longest + response}. Lower rollout.response_len to "
            f"{max(by_length[1] - longest, 0)} or data.prompt_len, or take a model with one scaling, such as yarn"
        )
    if limit is not None and longest + response > limit:
        raise ConfigError(
            f"model.path={config.model.path} has {limit} positions, but the longest prompt has {longest} tokens "
            f"(data.prompt_len={config.data.prompt_len}) and a response up to rollout.response_len={response}, which "
            f"is {longest + response}; lower rollout.response_len to {max(limit - longest, 0)}, or data.prompt_len"
        )


def read_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder. Raises the errors of transformers, such as OSError.

    Its chat template gets `model.chat_template_kwargs` in each rendering; arguments of `apply_chat_template` override
    them. It reads `model.date` as today, so that a resumed run has the same prompts. For prompts use
    `rlcore.data.chat.load_tokenizer`, which checks it.
    """
    from transformers import AutoTokenizer

    folder = model_path(model.path, "tokenizer", code=model.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(folder, **loading_options(model))
    own = model.chat_template and Path(model.chat_template).expanduser()
    template = own.read_text(encoding="utf-8") if own and own.is_file() else str(tokenizer.chat_template)
    given = dict(model.chat_template_kwargs)
    if model.date is not None and "strftime_now" in template:
        # A variable of the rendering hides transformers' function of this name, which reads the clock.
        given["strftime_now"] = datetime.datetime.fromisoformat(model.date).strftime
    if given:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)  # type: ignore[method-assign]
    return tokenizer


def model_dtype(model: ModelConfig) -> torch.dtype:
    """Return the precision of a model's forward pass as a torch dtype."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[model.dtype]
