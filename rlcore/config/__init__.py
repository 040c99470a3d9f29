"""The typed configuration of a run: its schema, and how overrides and files become it. Imports no torch."""

from rlcore.config.build import build
from rlcore.config.compose import compose
from rlcore.config.files import from_yaml, same_run, to_yaml
from rlcore.config.schema import (
    ALL_LINEAR,
    ClusterConfig,
    Config,
    CurriculumConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    EvalSetConfig,
    LoraConfig,
    MixConfig,
    ModelConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrackerConfig,
    TrainerConfig,
    option,
)

__all__ = [
    "ALL_LINEAR",
    "ClusterConfig",
    "Config",
    "CurriculumConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalSetConfig",
    "LoraConfig",
    "MixConfig",
    "ModelConfig",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "TrackerConfig",
    "TrainerConfig",
    "build",
    "compose",
    "from_yaml",
    "option",
    "same_run",
    "to_yaml",
]
