"""The attention implementations that a config may choose."""

from __future__ import annotations

from rlcore.config import Config
from rlcore.errors import ConfigError, did_you_mean

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
