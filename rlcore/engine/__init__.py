"""The shared parts of all engines, and the public interface for engines of your own. Runs in worker processes.

Plugins that bring an engine may import the names below (docs/write_an_engine.md). Each is imported at its first use, so
`import rlcore.engine` itself does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.engine.collectives import Ranks
    from rlcore.engine.generators import random_state, set_random_state
    from rlcore.engine.model_folder import write_model_folder
    from rlcore.engine.parallel.layout import Layout, ShardSpec
    from rlcore.engine.parallel.model_shape import ModelShape, engine_of, layout_of
    from rlcore.engine.responses import end_tokens, ends_with_stop
    from rlcore.engine.rollout import (
        Finished,
        Request,
        RolloutEngine,
        RolloutSetup,
        Sampling,
        check_requests,
        refuse_in_flight,
    )
    from rlcore.engine.sampling import sample_tokens
    from rlcore.engine.train import ENGINE_STATE, Approve, Finish, TrainEngine, TrainSetup
    from rlcore.engine.update.items import Importance, UpdateItem
    from rlcore.engine.update.updater import Updater
    from rlcore.engine.weights.generation import GenerationLayout
    from rlcore.engine.weights.transfer import Shapes, check_same_parameters, checked
    from rlcore.model_folder import load_model_config, model_path

_MODULES = {
    "rlcore.engine.collectives": ["Ranks"],
    "rlcore.engine.model_folder": ["write_model_folder"],
    "rlcore.engine.parallel.layout": ["Layout", "ShardSpec"],
    "rlcore.engine.parallel.model_shape": ["ModelShape", "engine_of", "layout_of"],
    "rlcore.model_folder": ["load_model_config", "model_path"],
    "rlcore.engine.generators": ["random_state", "set_random_state"],
    "rlcore.engine.responses": ["end_tokens", "ends_with_stop"],
    "rlcore.engine.rollout": [
        "Finished",
        "Request",
        "RolloutEngine",
        "RolloutSetup",
        "Sampling",
        "check_requests",
        "refuse_in_flight",
    ],
    "rlcore.engine.sampling": ["sample_tokens"],
    "rlcore.engine.train": ["ENGINE_STATE", "Approve", "Finish", "TrainEngine", "TrainSetup"],
    "rlcore.engine.update.items": ["Importance", "UpdateItem"],
    "rlcore.engine.update.updater": ["Updater"],
    "rlcore.engine.weights.generation": ["GenerationLayout"],
    "rlcore.engine.weights.transfer": ["Shapes", "check_same_parameters", "checked"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ENGINE_STATE",
    "Approve",
    "Finish",
    "Finished",
    "GenerationLayout",
    "Importance",
    "Layout",
    "ModelShape",
    "Ranks",
    "Request",
    "RolloutEngine",
    "RolloutSetup",
    "Sampling",
    "Shapes",
    "ShardSpec",
    "TrainEngine",
    "TrainSetup",
    "UpdateItem",
    "Updater",
    "check_requests",
    "check_same_parameters",
    "checked",
    "end_tokens",
    "ends_with_stop",
    "engine_of",
    "layout_of",
    "load_model_config",
    "model_path",
    "random_state",
    "refuse_in_flight",
    "sample_tokens",
    "set_random_state",
    "write_model_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlcore.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
