"""Start the workers of all roles on their pools, and give out their handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.engine.worker import ModelWorker, RoleSetup
from rlcore.plugins import CRITIC, REWARD, Role
from rlcore.roles.handles import CriticHandle, PolicyHandle, RewardHandle, RoleHandle, StepClock
from rlcore.roles.placement import ROLLOUT, PoolPlan, sampled_role
from rlcore.roles.settings import reads_text, role_config
from rlcore.workers import ClassWithInitArgs, Executor, ResourcePool, WorkerGroup
from rlcore.workers.executor import ProcessRequest

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager

OpenPool = tuple[PoolPlan, ResourcePool]
"""A planned pool, and its places."""


def start_roles(
    config: Config,
    executor: Executor,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    clock: StepClock,
    pools: Sequence[OpenPool],
    *,
    extra: Sequence[ProcessRequest] = (),
) -> tuple[dict[str, RoleHandle], list[WorkerGroup]]:
    """Start the workers of all roles on their pools, load their models, and return the handles.

    extra: further processes to start at the same time, with one worker class each; their groups are returned too. Such
    a class has a method `start` that does not block, as the workers of roles do; its errors come first.
    """
    setups = {name: _setup(name, role, config, plugins) for name, role in roles.items()}
    sampled = sampled_role(roles) if any(ROLLOUT in planned.roles for planned, _ in pools) else None
    if sampled is not None:
        setups[ROLLOUT] = replace(setups[sampled], samples_only=True)
        setups[sampled] = replace(setups[sampled], role=replace(roles[sampled], generates=False))
    process_sets = [(pool, names) for planned, pool in pools for names in planned.process_sets]
    asked = [*extra, *(_process_request(pool, names, setups) for pool, names in process_sets)]
    started = executor.worker_groups(asked)
    others = [group for groups in started[: len(extra)] for group in groups.values()]
    groups: dict[str, WorkerGroup] = {}
    for together in started[len(extra) :]:
        groups.update(together)
    for loading in [group.start() for group in [*others, *groups.values()]]:
        loading.get()
    process_mates = {name: names for _, names in process_sets for name in names}
    handles = {}
    for name, role in roles.items():
        follows_elsewhere = role.follows is not None and role.follows not in process_mates[name]
        handles[name] = _handle(
            name,
            role,
            groups[name],
            role_config(config, name, role),
            clock,
            leader=groups[role.follows] if role.follows is not None and follows_elsewhere else None,
            rollout=groups[ROLLOUT] if name == sampled else None,
            reads_text=setups[name].reads_text,
        )
    return handles, others


def _setup(name: str, role: Role, config: Config, plugins: PluginManager) -> RoleSetup:
    own = role_config(config, name, role)
    return RoleSetup(
        role=role,
        model=own.model,
        engine=own.engine,
        rollout=own.rollout,
        create_train=plugins.train_engines()[own.engine.name].create,
        create_rollout=plugins.rollout_engines()[own.rollout.name].create,
        train_config=own.sections.get(f"engine.{own.engine.name}"),
        rollout_config=own.sections.get(f"rollout.{own.rollout.name}"),
        seed=own.trainer.seed,
        total_steps=own.trainer.total_steps,
        reads_text=reads_text(role, config),
    )


def _process_request(pool: ResourcePool, names: Sequence[str], setups: Mapping[str, RoleSetup]) -> ProcessRequest:
    """Return the processes of roles that share them, one on each place of the pool."""
    classes = {name: ClassWithInitArgs(ModelWorker, setups[name]) for name in names}
    return ProcessRequest(pool, classes, "-".join(names))


def _handle(
    name: str,
    role: Role,
    group: WorkerGroup,
    config: Config,
    clock: StepClock,
    *,
    leader: WorkerGroup | None,
    rollout: WorkerGroup | None,
    reads_text: bool,
) -> RoleHandle:
    """Return the handle of the role's kind."""
    if role.kind == CRITIC:
        return CriticHandle(name, role, group, config, clock, leader=leader)
    if role.kind == REWARD:
        return RewardHandle(name, role, group, config, clock, leader=leader, reads_text=reads_text)
    return PolicyHandle(name, role, group, config, clock, leader=leader, rollout=rollout)
