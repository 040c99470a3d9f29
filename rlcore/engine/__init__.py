"""The shared parts of all engines, and the public interface for engines of your own.

They run in worker processes. The controller too reads the layouts (`parallel/`, `weights/generation.py`) and cuts rows
for an update (`update/microbatch.py`).

Plugins that bring an engine may import the names below (docs/write_an_engine.md). Each is imported at its first use, so
`import rlcore.engine` itself does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.config import EngineConfig as EngineConfig
    from rlcore.config import ModelConfig as ModelConfig
    from rlcore.config import RolloutConfig as RolloutConfig
    from rlcore.end_tokens import end_tokens as end_tokens
    from rlcore.engine.collectives import Ranks as Ranks
    from rlcore.engine.generators import random_state as random_state
    from rlcore.engine.generators import set_random_state as set_random_state
    from rlcore.engine.model_folder import check_writable as check_writable
    from rlcore.engine.model_folder import write_model_folder as write_model_folder
    from rlcore.engine.parallel.layout import Layout as Layout
    from rlcore.engine.parallel.layout import ShardSpec as ShardSpec
    from rlcore.engine.parallel.mesh import TrainMesh as TrainMesh
    from rlcore.engine.parallel.model_shape import ModelShape as ModelShape
    from rlcore.engine.parallel.model_shape import engine_of as engine_of
    from rlcore.engine.parallel.model_shape import layout_of as layout_of
    from rlcore.engine.parallel.tensor_parallel import shard_dims as shard_dims
    from rlcore.engine.responses import ends_with_stop as ends_with_stop
    from rlcore.engine.rollout import Finished as Finished
    from rlcore.engine.rollout import Reason as Reason
    from rlcore.engine.rollout import Request as Request
    from rlcore.engine.rollout import RolloutEngine as RolloutEngine
    from rlcore.engine.rollout import RolloutSetup as RolloutSetup
    from rlcore.engine.rollout import Sampling as Sampling
    from rlcore.engine.rollout import Untested as Untested
    from rlcore.engine.rollout import check_requests as check_requests
    from rlcore.engine.rollout import refuse_in_flight as refuse_in_flight
    from rlcore.engine.sampling import block_size as block_size
    from rlcore.engine.sampling import draw_from_blocks as draw_from_blocks
    from rlcore.engine.sampling import sample_tokens as sample_tokens
    from rlcore.engine.train import ENGINE_STATE as ENGINE_STATE
    from rlcore.engine.train import Approve as Approve
    from rlcore.engine.train import Finish as Finish
    from rlcore.engine.train import TrainEngine as TrainEngine
    from rlcore.engine.train import TrainSetup as TrainSetup
    from rlcore.engine.update.items import Importance as Importance
    from rlcore.engine.update.items import Numerics as Numerics
    from rlcore.engine.update.items import UpdateItem as UpdateItem
    from rlcore.engine.update.micro_batch_size import micro_batch_limit as micro_batch_limit
    from rlcore.engine.update.updater import Updater as Updater
    from rlcore.engine.weights.fingerprint import checksum as checksum
    from rlcore.engine.weights.fingerprint import sum_checksums as sum_checksums
    from rlcore.engine.weights.generation import GenerationLayout as GenerationLayout
    from rlcore.engine.weights.meter import Group as Group
    from rlcore.engine.weights.transfer import Shapes as Shapes
    from rlcore.engine.weights.transfer import check_same_parameters as check_same_parameters
    from rlcore.engine.weights.transfer import checked as checked
    from rlcore.model_folder import load_model_config as load_model_config
    from rlcore.model_folder import loading_options as loading_options
    from rlcore.model_folder import model_dtype as model_dtype
    from rlcore.model_folder import model_path as model_path
    from rlcore.model_folder import read_tokenizer as read_tokenizer


_HOMES = {
    "rlcore.config": ["EngineConfig", "ModelConfig", "RolloutConfig"],
    "rlcore.engine.collectives": ["Ranks"],
    "rlcore.engine.generators": ["random_state", "set_random_state"],
    "rlcore.engine.model_folder": ["check_writable", "write_model_folder"],
    "rlcore.engine.parallel.layout": ["Layout", "ShardSpec"],
    "rlcore.engine.parallel.mesh": ["TrainMesh"],
    "rlcore.engine.parallel.model_shape": ["ModelShape", "engine_of", "layout_of"],
    "rlcore.engine.parallel.tensor_parallel": ["shard_dims"],
    "rlcore.end_tokens": ["end_tokens"],
    "rlcore.engine.responses": ["ends_with_stop"],
    "rlcore.engine.rollout": [
        "Finished",
        "Reason",
        "Request",
        "RolloutEngine",
        "RolloutSetup",
        "Sampling",
        "Untested",
        "check_requests",
        "refuse_in_flight",
    ],
    "rlcore.engine.sampling": ["block_size", "draw_from_blocks", "sample_tokens"],
    "rlcore.engine.train": ["ENGINE_STATE", "Approve", "Finish", "TrainEngine", "TrainSetup"],
    "rlcore.engine.update.items": ["Importance", "Numerics", "UpdateItem"],
    "rlcore.engine.update.micro_batch_size": ["micro_batch_limit"],
    "rlcore.engine.update.updater": ["Updater"],
    "rlcore.engine.weights.fingerprint": ["checksum", "sum_checksums"],
    "rlcore.engine.weights.generation": ["GenerationLayout"],
    "rlcore.engine.weights.meter": ["Group"],
    "rlcore.engine.weights.transfer": ["Shapes", "check_same_parameters", "checked"],
    "rlcore.model_folder": ["load_model_config", "loading_options", "model_dtype", "model_path", "read_tokenizer"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rlcore.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
