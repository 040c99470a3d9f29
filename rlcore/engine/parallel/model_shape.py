"""The layouts that a model can train under, read from its config.json before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.parallel.layout import Layout
from rlcore.errors import ConfigError
from rlcore.model_folder import load_model_config

STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise")
"""Supported entries of transformers' tensor-parallel plans; embeddings stay whole on every rank."""
FULL_ATTENTION = frozenset({"full_attention"})
"""The `attention_kinds` of a model in which every token attends to all earlier tokens, at any length."""


def attention_kinds(config: Any) -> frozenset[str]:
    """Return the kinds of attention of a transformers config's decoder layers, in transformers' words.

    `layer_types` names them. Without it all layers are equal, with a sliding window if the config sets and enables one.
    """
    text = config.get_text_config()
    if kinds := getattr(text, "layer_types", None):
        return frozenset(kinds)
    windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    return frozenset({"sliding_attention"}) if windowed else FULL_ATTENTION


def engine_of(engine: EngineConfig, role: str) -> EngineConfig:
    """Return the engine's config for one role, with the role's `pp` and `tp` from `engine.layouts`.

    Raises ConfigError for a layout that is not two numbers from 1.
    """
    if role not in engine.layouts:
        return engine
    asked = engine.layouts[role]
    if len(asked) != 2 or min(asked) < 1:
        raise ConfigError(f"engine.layouts.{role} = {asked} must be [pp, tp], two numbers from 1, as in [1, 2]")
    return replace(engine, pp=asked[0], tp=asked[1])


def layout_of(engine: EngineConfig, workers: int) -> Layout:
    """Return the layout of a role on `workers` workers. Raises ConfigError unless pp * tp divides their number."""
    dp, rest = divmod(workers, engine.pp * engine.tp)
    if rest:
        raise ConfigError(
            f"engine.pp={engine.pp}, engine.tp={engine.tp} does not fit {workers} workers: pp * tp must divide their "
            f"number. Set cluster.workers={engine.pp * engine.tp}, or a multiple"
        )
    return Layout(pp=engine.pp, tp=engine.tp, dp=dp)


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide its possible layouts.

    `divided`: the sizes that tensor-parallel ranks divide, by name; empty for a model without a supported
    tensor-parallel plan. `layers` is 1 for a model that cannot be divided into stages. `why_not` gives the reasons.
    """

    layers: int
    divided: Mapping[str, int]
    why_not: str = ""

    @staticmethod
    def of(config: Any) -> ModelShape:
        """Read a transformers config."""
        text = config.get_text_config()
        plan = getattr(text, "base_model_tp_plan", None) or {}
        why = []
        divided: dict[str, int] = {}
        if not plan or any(style not in STYLES for style in plan.values()):
            why.append("its code has no tensor-parallel plan of column- and row-wise linear layers")
        else:
            heads = int(text.num_attention_heads)
            divided = {
                "num_attention_heads": heads,
                "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
                "intermediate_size": int(text.intermediate_size),
            }
        layers = int(text.num_hidden_layers)
        if not getattr(text, "base_model_pp_plan", None) or attention_kinds(config) != FULL_ATTENTION:
            why.append("pipeline stages need decoder layers of full attention")
            layers = 1
        return ModelShape(layers, divided, "; ".join(why))

    def problem(self, layout: Layout) -> str:
        """Return the reason why the model cannot use a layout; "" if it can."""
        if layout.pp > self.layers:
            return f"pp={layout.pp} needs more layers than its {self.layers}; {self.why_not}".strip("; ")
        if layout.tp > 1 and not self.divided:
            return f"tp={layout.tp}: {self.why_not}"
        for name, number in self.divided.items():
            if number % layout.tp:
                return f"tp={layout.tp} does not divide its {name}={number}"
        return ""

    def possible(self, workers: int) -> list[Layout]:
        """Return the layouts of `workers` workers that the model can use."""
        counts = [n for n in range(1, workers + 1) if workers % n == 0]
        pairs = [(pp, tp) for pp, tp in product(counts, counts) if workers % (pp * tp) == 0]
        layouts = [Layout(pp, tp, workers // (pp * tp)) for pp, tp in pairs]
        return [layout for layout in layouts if not self.problem(layout)]


def check_model_layout(model: ModelConfig, layout: Layout) -> None:
    """Raise ConfigError, with a list of the possible layouts, when a model cannot use a layout.

    A folder that cannot be read here passes, as the workers check again.
    """
    if layout.pp == layout.tp == 1:
        return
    try:
        shape = ModelShape.of(load_model_config(model.path, model.trust_remote_code))
    except (OSError, ValueError):
        return
    if problem := shape.problem(layout):
        can = "; ".join(f"pp={each.pp} tp={each.tp} dp={each.dp}" for each in shape.possible(layout.world_size))
        raise ConfigError(
            f"model {model.path!r} cannot be trained with engine.pp={layout.pp} engine.tp={layout.tp}: {problem}. "
            f"With {layout.world_size} workers it can use: {can or 'none'}"
        )
