"""The config of a run as one of its roles sees it."""

from __future__ import annotations

from dataclasses import replace

from rlcore.config import Config
from rlcore.engine.parallel.model_shape import engine_of
from rlcore.plugins import Role


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
