"""Placement: turns `cluster.pools` into the pools that workers are started on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.errors import ConfigError
from rlcore.plugins import Role, TrainEngineSpec, WorkerSpec
from rlcore.roles.pool_checks import check_pools
from rlcore.roles.pools import REWARD_WORKERS, PoolPlan, PoolSettings, read_pools

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


@dataclass(frozen=True)
class Placement:
    """The pools of a run, and the plugins' workers on them, by name."""

    pools: Sequence[PoolPlan]
    groups: Mapping[str, WorkerSpec] = field(default_factory=dict)

    @staticmethod
    def of(config: Config, roles: Mapping[str, Role], plugins: PluginManager) -> Placement:
        """Return the placement of a run with these roles. Raises ConfigError as `plan_pools` does."""
        groups = plugins.workers(config)
        return Placement(plan_pools(config, roles, plugins.train_engines(), groups), groups)


def plan_pools(
    config: Config,
    roles: Mapping[str, Role],
    engines: Mapping[str, TrainEngineSpec] | None = None,
    groups: Mapping[str, WorkerSpec] | None = None,
) -> list[PoolPlan]:
    """Return the pools of `cluster.pools`; if it is empty, one pool of `cluster.workers` places with all roles.

    Reward functions that no pool lists get a pool of `reward.workers` places, and unlisted `groups` a pool by their
    spec.
    `engines`: the train engines by name; their own rules for layouts are checked too. Raises ConfigError for pools that
    cannot be read, and as `check_pools` does.
    """
    if config.cluster.pools == "auto":
        raise ConfigError(
            "cluster.pools=auto works in `rlcore train` only; here, give the pools that `rlcore plan` prints"
        )
    groups = groups or {}
    listed = read_pools(config)
    if not listed and roles:
        listed = {"main": PoolSettings([*roles])}
    pools = [_planned(name, settings, config, groups) for name, settings in listed.items()]
    if not any(REWARD_WORKERS in pool.roles for pool in pools):
        pools.append(PoolPlan(REWARD_WORKERS, (REWARD_WORKERS,), config.reward.workers))
    placed = {name for pool in pools for name in pool.groups}
    for name, spec in groups.items():
        if name not in placed:
            pools.append(PoolPlan(name, (), spec.workers, spec.cpus_per_worker, spec.gpus_per_worker, groups=(name,)))
    check_pools(pools, roles, config, engines or {}, groups)
    return pools


def _planned(name: str, asked: PoolSettings, config: Config, groups: Mapping[str, WorkerSpec]) -> PoolPlan:
    cluster = config.cluster
    # Defaults of a pool with models. A pool with only reward functions or plugins' workers has their own defaults.
    workers, cpus, gpus = cluster.workers, cluster.cpus_per_worker, cluster.gpus_per_worker
    own = [groups[role] for role in asked.roles if role in groups]
    if asked.roles == [REWARD_WORKERS]:
        workers, cpus, gpus = config.reward.workers, 1, 0.0
    elif own and len(own) == len(asked.roles):
        workers = max(spec.workers for spec in own)
        cpus = max(spec.cpus_per_worker for spec in own)
        gpus = max(spec.gpus_per_worker for spec in own)
    return PoolPlan(
        name=name,
        roles=tuple(role for role in asked.roles if role not in groups),
        workers=workers if asked.workers is None else asked.workers,
        cpus_per_worker=cpus if asked.cpus_per_worker is None else asked.cpus_per_worker,
        gpus_per_worker=gpus if asked.gpus_per_worker is None else asked.gpus_per_worker,
        node=asked.node,
        colocate=asked.colocate or cluster.colocate,
        groups=tuple(role for role in asked.roles if role in groups),
    )


def restrict_to_roles(config: Config, roles: Mapping[str, Role]) -> Config:
    """Return a copy of the config restricted to these (frozen) roles, e.g. for evaluation."""
    kept: dict[str, Any] = {}
    for name, pool in read_pools(config).items():
        if wanted := [role for role in pool.roles if role in roles or role == REWARD_WORKERS]:
            given = {key: value for key, value in vars(pool).items() if value is not None}
            kept[name] = {**given, "roles": wanted}
    # Settings of roles that are left out would be errors: they name unknown roles.
    layouts = {name: layout for name, layout in config.engine.layouts.items() if name in roles}
    return replace(
        config,
        cluster=replace(config.cluster, pools=kept),
        engine=replace(config.engine, layouts=layouts),
        roles={name: own for name, own in config.roles.items() if name in roles},
        trainer=replace(config.trainer, rollouts_ahead=0),
    )
