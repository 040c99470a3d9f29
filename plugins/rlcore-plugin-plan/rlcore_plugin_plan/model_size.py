"""The size of a model: its parameters and the operations of a token, from config.json only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from rlcore import ConfigError
from rlcore.engine import ModelShape, load_model_config

Head = Literal["vocabulary", "number"]


@dataclass(frozen=True)
class ModelSize:
    """A decoder of `layers` equal layers of `layer` parameters each, and embeddings of `vocab` times `hidden`.

    `heads` query heads and `kv_heads` key and value heads of `head_size`. `head`: the last layer gives a logit for each
    token, or one number. `shape` decides the possible layouts.
    """

    layers: int
    hidden: int
    layer: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool = True
    head: Head = "vocabulary"
    shape: ModelShape = field(default=ModelShape(1, {}), compare=False)

    @property
    def embeddings(self) -> int:
        """Parameters before and after the layers."""
        table = self.vocab * self.hidden
        return table if self.tied or self.head == "number" else 2 * table

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer + self.embeddings

    def layer_flops(self, tokens: float, context: float) -> float:
        """Floating-point operations of one layer's forward over `tokens` that attend to `context` others on average.

        2 for each parameter and token, and 4 heads head_size for each attended token: the products with queries and
        with values (Kaplan et al., arXiv 2001.08361, section 2.1). In causal attention over n tokens the mean is n / 2.
        """
        return tokens * (2.0 * self.layer + 4.0 * self.heads * self.head_size * context)

    def head_flops(self, tokens: float) -> float:
        """Floating-point operations of the head over `tokens`."""
        return 2.0 * tokens * self.hidden * (self.vocab if self.head == "vocabulary" else 1)

    def cache_elements(self, tokens: float) -> float:
        """Elements of the keys and values of `tokens`, in all layers."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * tokens


def size_of(path: str, trust_remote_code: bool = False, head: Head = "vocabulary") -> ModelSize:
    """Return the size of a model folder's model, with `head` in place of its own.

    Reads config.json and no weights. Raises ConfigError for a folder that cannot be read, and for a mixture of experts:
    its tokens do not all use the same parameters.
    """
    return replace(_size_of(path, trust_remote_code), head=head)


@cache
def _size_of(path: str, trust_remote_code: bool) -> ModelSize:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = load_model_config(path, trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path = {path!r}: config.json cannot be read, and a plan needs it: {reason}. Give the folder of a "
            "Hugging Face model; weights are not needed"
        ) from error
    text = config.get_text_config()
    experts = next((name for name in ("num_experts", "num_local_experts") if getattr(text, name, 0)), None)
    if experts is not None:
        raise ConfigError(
            f"model.path = {path!r} is a mixture of {getattr(text, experts)} experts, for which the planner has no "
            "cost model: each token uses other parameters. Choose pools by hand, see docs/placement.md"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is None or head.weight is table or bool(getattr(text, "tie_word_embeddings", False))
    outside = table.numel() if tied or head is None else table.numel() + head.weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = int(text.num_attention_heads)
    return ModelSize(
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        layer=(total - outside) // int(text.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_size=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocab=int(table.shape[0]),
        tied=tied,
        shape=ModelShape.of(config),
    )
