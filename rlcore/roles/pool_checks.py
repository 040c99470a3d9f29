"""Checks of a run's pools, before anything starts: their roles, places, layouts, and the sampling copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcore.config import Config
from rlcore.engine.parallel.layout import Layout
from rlcore.engine.parallel.model_shape import check_model_layout, layout_of
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins import Role, TrainEngineSpec, WorkerSpec
from rlcore.roles.pools import REWARD_WORKERS, ROLLOUT, PoolPlan, sampled_role
from rlcore.roles.settings import own_section, role_config


def check_pools(
    pools: Sequence[PoolPlan],
    roles: Mapping[str, Role],
    config: Config,
    engines: Mapping[str, TrainEngineSpec],
    groups: Mapping[str, WorkerSpec],
) -> None:
    """Raise ConfigError for the first impossible pool.

    engines: the train engines by name. Layout rules of an engine that is not among them are not checked.
    groups: the workers of plugins by name.
    """
    pool_of = _pool_of_each(pools, roles, groups)
    for pool in pools:
        _check_places(pool, in_process=config.cluster.executor == "in_process")
        _check_groups(pool, groups)
    _check_layout_names(config, roles)
    _check_all_placed(pools, pool_of, roles)
    if ROLLOUT in pool_of:
        _check_rollout(pool_of, roles)
    else:
        _check_no_rollouts_ahead(roles, config)
    for pool in pools:
        _check_layouts(pool, roles, config, engines, sampled_elsewhere=ROLLOUT in pool_of)
        if ROLLOUT in pool.roles:
            _check_shards(pool, role_config(config, sampled_role(roles), roles[sampled_role(roles)]))


def _pool_of_each(
    pools: Sequence[PoolPlan], roles: Mapping[str, Role], groups: Mapping[str, WorkerSpec]
) -> dict[str, str]:
    """Return each listed name's pool. Raises ConfigError for unknown and repeated names."""
    for name in groups:
        if name in (*roles, REWARD_WORKERS, ROLLOUT):
            raise ConfigError(
                f"a plugin's workers are named {name!r}, like a role of this run or a reserved name of pools; "
                "rename one of them, or block the plugin with -p no:NAME"
            )
    known = [*roles, REWARD_WORKERS, ROLLOUT, *groups]
    pool_of: dict[str, str] = {}
    for pool in pools:
        listed = [*pool.roles, *pool.groups]
        if not listed:
            raise ConfigError(f"cluster.pools.{pool.name} lists no role; list one, or leave the pool out")
        for name in listed:
            if name not in known:
                raise ConfigError(
                    f"cluster.pools.{pool.name} lists {name!r}, but this run has no such role."
                    f"{did_you_mean(name, known)} Its roles: {', '.join(roles) or 'none'}; a pool may also list "
                    f"{', '.join([REWARD_WORKERS, ROLLOUT, *groups])}"
                )
            if name in pool_of:
                both = (pool_of[name], pool.name)
                where = f"pool {pool.name} twice" if both[0] == both[1] else "pools " + " and ".join(both)
                raise ConfigError(f"cluster.pools: {name!r} is in {where}; list it once")
            pool_of[name] = pool.name
    return pool_of


def _check_layout_names(config: Config, roles: Mapping[str, Role]) -> None:
    for name in config.engine.layouts:
        if name not in roles:
            raise ConfigError(
                f"engine.layouts has {name!r}, but this run has no such role.{did_you_mean(name, roles)} "
                f"Its roles: {', '.join(roles) or 'none'}"
            )


def _check_all_placed(pools: Sequence[PoolPlan], pool_of: Mapping[str, str], roles: Mapping[str, Role]) -> None:
    if missing := [name for name in roles if name not in pool_of]:
        raise ConfigError(
            f"cluster.pools lacks {', '.join(missing)}; add each to one of the pools "
            f"{', '.join(pool.name for pool in pools)}, or to a new one"
        )


def _check_places(pool: PoolPlan, *, in_process: bool) -> None:
    where, gpus, models = f"cluster.pools.{pool.name}", pool.gpus_per_worker, pool.process_sets
    users = pool.roles or pool.groups  # next to roles, the workers of plugins use no GPU
    separate = models if pool.roles else pool.groups
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"{where}: gpus_per_worker = {gpus} must be a whole number or a share below 1")
    if gpus > 1 and len(separate) > 1:
        raise ConfigError(
            f"{where}: {', '.join(users)} are separate processes and cannot share "
            f"places of {gpus:g} GPUs; set gpus_per_worker to 1 or less with more workers, or colocate: fused"
        )
    if in_process and models and pool.workers != 1:
        raise ConfigError(
            f"{where}: workers = {pool.workers}, but cluster.executor = in_process runs engines in this process, so it "
            "must be 1; leave it out, or choose cluster=local for Ray"
        )


def _check_groups(pool: PoolPlan, groups: Mapping[str, WorkerSpec]) -> None:
    """Check that plugins' workers with GPUs are on a pool without roles, as roles take all its GPUs."""
    for name in pool.groups:
        if groups[name].gpus_per_worker > 0 and pool.roles:
            raise ConfigError(
                f"cluster.pools.{pool.name} lists {name!r} together with {', '.join(pool.roles)}, but its workers need "
                "GPUs of their own; list it in a pool without roles, or leave it out of cluster.pools"
            )


def _check_rollout(pool_of: Mapping[str, str], roles: Mapping[str, Role]) -> None:
    sampled = sampled_role(roles)
    if pool_of[sampled] == pool_of[ROLLOUT]:
        raise ConfigError(
            f"cluster.pools.{pool_of[ROLLOUT]} lists {ROLLOUT} together with {sampled}, which samples there itself: "
            f"leave {ROLLOUT} out, or list it in another pool"
        )


def _check_no_rollouts_ahead(roles: Mapping[str, Role], config: Config) -> None:
    if ahead := config.trainer.rollouts_ahead:
        raise ConfigError(
            f"trainer.rollouts_ahead = {ahead} needs a second pool, which samples while the actor trains: add one, as "
            f"cluster.pools={{main: [{', '.join(roles)}], side: [{ROLLOUT}]}}, or set trainer.rollouts_ahead=0"
        )


def _check_layouts(
    pool: PoolPlan,
    roles: Mapping[str, Role],
    config: Config,
    engines: Mapping[str, TrainEngineSpec],
    *,
    sampled_elsewhere: bool,
) -> None:
    models = [name for name in pool.roles if name in roles]
    settings = {name: role_config(config, name, roles[name]) for name in models}
    for name in models:
        # `rollout.tp` concerns only the workers that sample.
        generates = roles[name].generates and not sampled_elsewhere
        try:
            _check_layout(settings[name], pool.workers, engines, generates=generates)
        except ConfigError as error:
            raise ConfigError(f"pool {pool.name}, {name}: {error}") from None
    for name in models:
        leader = roles[name].follows
        if leader in settings and _spread(settings[leader]) != _spread(settings[name]):
            raise ConfigError(
                f"pool {pool.name}: {name} follows {leader} and copies its weights shard by shard, so both need "
                f"the same engine and the same [pp, tp] in engine.layouts; or put {name} into another pool"
            )


def _check_layout(config: Config, workers: int, engines: Mapping[str, TrainEngineSpec], *, generates: bool) -> None:
    """Check the layout of one role; `config` is the role's own."""
    layout = layout_of(config.engine, workers)
    if config.engine.name in engines:
        _check_engine_layout(engines[config.engine.name], layout, config)
    check_model_layout(config.model, layout)
    if generates:
        GenerationLayout(layout, tp=config.rollout.tp)


def _spread(config: Config) -> tuple[str, int, int]:
    """Return the settings that decide the shards of a role's weights."""
    return config.engine.name, config.engine.pp, config.engine.tp


def _check_engine_layout(engine: TrainEngineSpec, layout: Layout, config: Config) -> None:
    if not engine.capabilities.layouts and layout.world_size > 1:
        raise ConfigError(
            f"engine={engine.name} supports one worker, not {layout.world_size}: set "
            "cluster.workers=1, or choose another engine"
        )
    if engine.check_layout is not None:
        engine.check_layout(own_section(config, f"engine.{engine.name}", engine.config_class), layout)


def _check_shards(pool: PoolPlan, config: Config) -> None:
    """Check `rollout.tp` on a pool of sampling copies; their layouts do not depend on the trained role's."""
    shards = config.rollout.tp
    if pool.workers % shards:
        possible = ", ".join(str(n) for n in range(1, pool.workers + 1) if pool.workers % n == 0)
        raise ConfigError(
            f"pool {pool.name}, {ROLLOUT}: rollout.tp={shards} does not divide its {pool.workers} workers; it can be "
            f"{possible}"
        )
