"""Which layouts a model can train under, known from its config.json before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlcore.assets import model_path
from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.parallel.layout import Layout
from rlcore.errors import ConfigError

STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise")
"""Entries of transformers' tensor-parallel plans that are understood; embeddings are left whole on every rank."""


def engine_of(engine: EngineConfig, role: str) -> EngineConfig:
    """Return the engine's config for one role, whose `pp` and `tp` are those of `engine.layouts` if it is there.

    Raises ConfigError for a layout that is not two numbers from 1.
    """
    if role not in engine.layouts:
        return engine
    asked = engine.layouts[role]
    if len(asked) != 2 or min(asked) < 1:
        raise ConfigError(f"engine.layouts.{role} = {asked} must be [pp, tp], two numbers from 1, as in [1, 2]")
    return replace(engine, pp=asked[0], tp=asked[1], dp=0)


def layout_of(engine: EngineConfig, workers: int) -> Layout:
    """Return the layout of a role on so many workers. Raises ConfigError when the product does not fit their number."""
    if workers % (engine.pp * engine.tp) or engine.dp not in (0, workers // (engine.pp * engine.tp)):
        asked = f"engine.pp={engine.pp}, engine.tp={engine.tp}, engine.dp={engine.dp}"
        needed = engine.pp * engine.tp * max(1, engine.dp)
        raise ConfigError(
            f"{asked} does not fit {workers} workers: pp * tp * dp must be their number. Set cluster.workers={needed}, "
            "or engine.dp=0 for as many places as there are workers for"
        )
    return Layout(pp=engine.pp, tp=engine.tp, dp=workers // (engine.pp * engine.tp))


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides which layouts it can take.

    `divided` are the numbers that tensor-parallel ranks divide, by name; empty where the model's code has no
    tensor-parallel plan that is understood. `layers` is 1 where it cannot be cut into stages.
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
        windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
        kinds = set(getattr(text, "layer_types", None) or (["sliding"] if windowed else ["full_attention"]))
        if not getattr(text, "base_model_pp_plan", None) or kinds != {"full_attention"}:
            why.append("pipeline stages need decoder layers of full attention")
            layers = 1
        return ModelShape(layers, divided, "; ".join(why))

    def problem(self, layout: Layout) -> str:
        """Return why the model cannot take a layout; "" if it can."""
        if layout.pp > self.layers:
            return f"pp={layout.pp} is more stages than it has layers to cut ({self.layers}); {self.why_not}".strip(
                "; "
            )
        if layout.tp > 1 and not self.divided:
            return f"tp={layout.tp}: {self.why_not}"
        for name, number in self.divided.items():
            if number % layout.tp:
                return f"tp={layout.tp} does not divide its {name}={number}"
        return ""

    def possible(self, workers: int) -> list[Layout]:
        """Return the layouts of so many workers that the model can take."""
        counts = [n for n in range(1, workers + 1) if workers % n == 0]
        layouts = [Layout(pp, tp, workers // (pp * tp)) for pp in counts for tp in counts if workers % (pp * tp) == 0]
        return [layout for layout in layouts if not self.problem(layout)]


@cache
def _shape_of(path: str, trust_remote_code: bool) -> ModelShape:
    from transformers import AutoConfig

    folder = model_path(path)
    return ModelShape.of(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True))


def check_model_layout(model: ModelConfig, layout: Layout) -> None:
    """Raise ConfigError, listing those that it can, when a model cannot take a layout.

    A folder that cannot be read here is left to the workers, which check again.
    """
    if layout.pp == layout.tp == 1:
        return
    try:
        shape = _shape_of(model.path, model.trust_remote_code)
    except (OSError, ValueError):
        return
    if problem := shape.problem(layout):
        can = "; ".join(f"pp={each.pp} tp={each.tp} dp={each.dp}" for each in shape.possible(layout.world_size))
        raise ConfigError(
            f"model {model.path!r} cannot be trained with engine.pp={layout.pp} engine.tp={layout.tp}: {problem}. "
            f"With {layout.world_size} workers it can take: {can or 'none'}"
        )
