"""The roles of a run, and the run's config as each of them sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlcore.config import Config
from rlcore.data.chat import same_tokenizer
from rlcore.engine.parallel.model_shape import engine_of
from rlcore.errors import ConfigError
from rlcore.plugins import REWARD, Role

REWARD_MODEL = "reward_model"
"""The role that `reward.model` adds to an algorithm's own."""


def resolve_roles(declared: Mapping[str, Role], config: Config) -> dict[str, Role]:
    """Return the roles of a run: those that the algorithm declares, and the reward model if `reward.model` names one.

    Raises ConfigError when the algorithm has a role of that name too.
    """
    if config.reward.model is None:
        return dict(declared)
    if REWARD_MODEL in declared:
        raise ConfigError(
            f"algo={config.algorithm} brings a role {REWARD_MODEL!r} of its own; leave out "
            f"reward.model={config.reward.model}"
        )
    return {**declared, REWARD_MODEL: Role(kind=REWARD, model=config.reward.model)}


def role_config(config: Config, name: str, role: Role) -> Config:
    """Return a copy of the config with this role's own model folder, learning rate and layout.

    Raises ConfigError for a layout in `engine.layouts` that is not two numbers from 1.
    """
    engine = engine_of(config.engine, name)
    return replace(
        config,
        model=replace(config.model, path=role.model or config.model.path),
        engine=replace(engine, lr=engine.lr if role.lr is None else role.lr),
    )


def reads_text(role: Role, config: Config) -> bool:
    """Whether the role is a reward model whose tokenizer differs from the actor's, so that token ids mean nothing."""
    if not role.kind.reads_text or role.model is None:
        return False
    return not same_tokenizer(replace(config.model, path=role.model), config.model)
