"""What every engine shares, and the interface for engines of your own. Runs in worker processes.

The names below are public, beside those of `rlcore`. Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.engine.parallel.layout import Layout
    from rlcore.engine.parallel.model_shape import ModelShape, engine_of, layout_of, load_model_config
    from rlcore.engine.weights.generation import GenerationLayout

_HOMES = {
    "rlcore.engine.parallel.layout": ["Layout"],
    "rlcore.engine.parallel.model_shape": ["ModelShape", "engine_of", "layout_of", "load_model_config"],
    "rlcore.engine.weights.generation": ["GenerationLayout"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["GenerationLayout", "Layout", "ModelShape", "engine_of", "layout_of", "load_model_config"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rlcore.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
