"""The attention implementations that a config may choose."""

from __future__ import annotations

from rlcore.config import Config, ModelConfig
from rlcore.errors import ConfigError, did_you_mean
from rlcore.model_folder import has_sdpa, load_model_config

ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""The values of `model.attention`; all but `auto` are transformers' names."""


def check_attention(config: Config) -> None:
    """Raise ConfigError for an attention implementation that does not exist or cannot run as configured."""
    attention = config.model.attention
    if attention not in ATTENTION:
        raise ConfigError(
            f"model.attention={attention!r} is unknown.{did_you_mean(attention, ATTENTION)} "
            f"Allowed: {', '.join(ATTENTION)}"
        )
    if attention.startswith("flash") and (config.cluster.gpus_per_worker == 0 or config.model.dtype != "bf16"):
        raise ConfigError(
            f"model.attention={attention} needs GPUs and bf16; set cluster.gpus_per_worker=1 and model.dtype=bf16, or "
            "leave model.attention=auto"
        )


def plain_attention(model: ModelConfig) -> str:
    """Return the implementation of a model's own forward; `auto`: sdpa where the family has it, else eager.

    sdpa leaves out a soft cap of attention without a word: then `auto` is eager, and sdpa is a ConfigError.
    """
    config = load_model_config(model.path, model.trust_remote_code)
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if model.attention == "auto":
        return "sdpa" if has_sdpa(model) and cap is None else "eager"
    if model.attention == "sdpa" and cap is not None:
        raise ConfigError(
            f"model.attention=sdpa leaves out the soft cap of {model.path} (attn_logit_softcapping={cap}); leave it "
            "auto, which is eager for this model"
        )
    return model.attention
