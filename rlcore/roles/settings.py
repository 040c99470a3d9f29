"""The roles of a run, and each role's view of the run's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlcore.config import Config, LoraConfig, RoleConfig, RolloutConfig, build
from rlcore.config.build import to_plain
from rlcore.data.chat import same_tokenizer
from rlcore.engine.parallel.model_shape import engine_of
from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins import REWARD, Algorithm, Role

SLOW_ADAPTER = 1e-5
"""Learning rate below which a run says that adapters want a higher one."""
REWARD_MODEL = "reward_model"
"""The role that `reward.model` adds to the algorithm's roles."""


def resolve_roles(declared: Mapping[str, Role], config: Config) -> dict[str, Role]:
    """Return the roles of a run: the algorithm's, and the reward model of `reward.model`, with their settings applied.

    Raises ConfigError when the algorithm itself has a role of that name, and as `with_settings` does.
    """
    roles = dict(declared)
    if config.reward.model is not None:
        if REWARD_MODEL in declared:
            raise ConfigError(
                f"algo={config.algorithm} has its own role {REWARD_MODEL!r}; leave out "
                f"reward.model={config.reward.model}"
            )
        roles[REWARD_MODEL] = Role(kind=REWARD, model=config.reward.model)
    return with_settings(roles, config)


def with_settings(roles: Mapping[str, Role], config: Config) -> dict[str, Role]:
    """Return the roles with the settings of `roles.NAME.*`, which replace the algorithm's.

    Raises ConfigError for settings of an unknown role.
    """
    changed = dict(roles)
    for name, given in config.roles.items():
        if name not in roles:
            raise ConfigError(
                f"roles.{name}: this run has no role {name!r}.{did_you_mean(name, roles)} "
                f"Its roles: {', '.join(roles) or 'none'}"
            )
        role = roles[name]
        changed[name] = replace(
            role,
            model=given.model or role.model,
            dtype=given.dtype or role.dtype,
            lr=role.lr if given.lr is None else given.lr,
            engine=given.engine or role.engine,
            rollout={**role.rollout, **given.rollout},
        )
    return changed


def evaluated_roles(algorithm: Algorithm | None) -> dict[str, Role]:
    """Return the roles that an evaluation declares: the algorithm's if it evaluates by itself, otherwise the actor.

    The actor has the precision, the engine and the rollout keys that the algorithm gives it.
    """
    declared = {} if algorithm is None else dict(algorithm.roles())
    if algorithm is not None and algorithm.evaluates:
        return declared
    actor = declared.get("actor", Role())
    return {"actor": Role(generates=True, dtype=actor.dtype, engine=actor.engine, rollout=actor.rollout)}


def role_config(config: Config, name: str, role: Role) -> Config:
    """Return the config for one role, with its own model folder, dtype, learning rate, engine and rollout keys.

    A reward model that has a folder has its own arguments for its chat template; the run's are for the actor's.
    Raises ConfigError for an unknown rollout key, an invalid value, and a layout in `engine.layouts` that is not two
    numbers from 1.
    """
    engine = engine_of(config.engine, name)
    rollout = config.rollout
    if role.rollout:
        rollout = build(RolloutConfig, {**to_plain(rollout), **role.rollout}, f"roles.{name}.rollout")
    model = replace(config.model, path=role.model or config.model.path, dtype=role.dtype or config.model.dtype)
    model = replace(model, lora=_lora(config, name, role))
    if role.kind.reads_text and role.model is not None:
        model = replace(model, chat_template_kwargs=config.roles.get(name, RoleConfig()).chat_template_kwargs)
    return replace(
        config,
        model=model,
        engine=replace(engine, name=role.engine or engine.name, lr=engine.lr if role.lr is None else role.lr),
        rollout=rollout,
    )


def _lora(config: Config, name: str, role: Role) -> LoraConfig:
    """Return a role's adapter: `model.lora` with the keys of `roles.NAME.lora`.

    A role with a model of its own starts from no adapter, unless it names one. A role of rank 0 has none. Of a role
    that does not train, only the adapter counts from which it starts.
    """
    given = config.roles.get(name, RoleConfig()).lora
    if given.get("rank") == 0 and given.get("path") is None:
        return LoraConfig()
    shared = replace(config.model.lora, path=None) if role.model is not None else config.model.lora
    lora = build(LoraConfig, {**to_plain(shared), **given}, f"roles.{name}.lora") if given else shared
    return lora if role.trains else LoraConfig(path=lora.path)


def slow_adapters(config: Config, roles: Mapping[str, Role]) -> list[str]:
    """Return a line for each role whose adapter has a learning rate for training all weights."""
    own = {name: role_config(config, name, role) for name, role in roles.items() if role.trains}
    return [
        f"{name}: a learning rate of {each.engine.lr:g} is one for training all weights; an adapter wants about ten "
        "times as much (docs/lora.md)"
        for name, each in own.items()
        if each.model.lora.is_on and each.engine.lr < SLOW_ADAPTER
    ]


def has_own_settings(config: Config, own: Config) -> bool:
    """Whether a role's config `own` differs from the run's in a setting that engines read."""
    return any(getattr(own, part) != getattr(config, part) for part in ("model", "engine", "rollout"))


def own_section(config: Config, path: str, config_class: type | None) -> Any:
    """Return an engine's section of the config, at `engine.NAME` or `rollout.NAME`; its defaults if it is not there.

    A composed config holds the sections of all engines of its roles; roles that Python code starts may have others.
    """
    if path in config.sections or config_class is None:
        return config.sections.get(path)
    return config_class()


def reads_text(role: Role, config: Config) -> bool:
    """Whether the role is a reward model whose tokenizer differs from the actor's, so that it must read texts."""
    if not role.kind.reads_text or role.model is None:
        return False
    return not same_tokenizer(replace(config.model, path=role.model), config.model)
