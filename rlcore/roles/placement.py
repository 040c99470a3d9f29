"""Placement: which roles share which processes, from `cluster.pools` to the plans by which workers are started."""

# ruff: noqa: RUF009  (`option` declares a config field)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlcore.config import Config, option
from rlcore.config.build import build
from rlcore.engine.parallel.layout import Layout
from rlcore.engine.parallel.model_shape import check_model_layout, engine_of, layout_of
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.errors import ConfigError, did_you_mean
from rlcore.plugins import Role, TrainEngineSpec
from rlcore.workers import Executor, ResourcePool

REWARD_WORKERS = "reward"
"""In a pool: the workers of the reward functions, as processes of their own without GPUs."""
ROLLOUT = "rollout"
"""In a pool: a copy of the role that trains and generates, which does its sampling."""

Colocation = Literal["fused", "fractional"]


@dataclass(frozen=True)
class PoolSettings:
    """A pool as `cluster.pools` may spell it out; a list is short for its `roles`."""

    roles: list[str] = option(..., "what lives on the pool: roles, `reward`, `rollout`")
    workers: int | None = option(None, "places, each for one rank (default: cluster.workers)", min=1)
    cpus_per_worker: int | None = option(None, "cores of a place (default: cluster.cpus_per_worker)", min=1)
    gpus_per_worker: float | None = option(None, "GPUs of a place (default: cluster.gpus_per_worker)", min=0.0)
    node: str | None = option(None, "resource of Ray that the pool's nodes have (default: any node)")
    colocate: Colocation | None = option(None, "how the roles share the places (default: cluster.colocate)")


@dataclass(frozen=True)
class PoolPlan:
    """A pool of `workers` places, and what lives there: names of roles, REWARD_WORKERS and ROLLOUT.

    `fused` roles are workers in one process a place, `fractional` ones have a process each and take turns. `node` is a
    resource of Ray that every node of the pool has; None is any node.
    """

    name: str
    roles: tuple[str, ...]
    workers: int = 1
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    node: str | None = None
    colocate: Colocation = "fused"

    @property
    def process_sets(self) -> list[tuple[str, ...]]:
        """The models of the pool, those together that share processes."""
        models = tuple(name for name in self.roles if name != REWARD_WORKERS)
        if self.colocate == "fractional":
            return [(name,) for name in models]
        return [models] if models else []

    def open(self, executor: Executor) -> ResourcePool:
        """Return the executor's places for the pool."""
        return executor.resource_pool(
            self.workers,
            cpus_per_worker=self.cpus_per_worker,
            gpus_per_worker=self.gpus_per_worker,
            node=self.node,
            name=f"pool {self.name}",
        )


def plan(config: Config, roles: Mapping[str, Role], engine: TrainEngineSpec | None = None) -> list[PoolPlan]:
    """Return the pools of a run as `cluster.pools` asks; without it all roles are on one pool of `cluster.workers`.

    Reward functions that no pool lists get one of their own, of `reward.workers`. `engine`: the run's train engine,
    whose own rules for layouts are checked too. Raises ConfigError for pools that cannot be read, and as `check_plans`
    does.
    """
    cluster = config.cluster
    if cluster.pools == "auto":
        raise ConfigError("cluster.pools=auto is planned by `rlcore train`; here, write what `rlcore plan` found best")
    listed = read_pools(config)
    if not listed and roles:
        listed = {"main": PoolSettings([*roles])}
    plans = [_planned(name, settings, config) for name, settings in listed.items()]
    if not any(REWARD_WORKERS in pool.roles for pool in plans):
        plans.append(PoolPlan(REWARD_WORKERS, (REWARD_WORKERS,), config.reward.workers))
    check_plans(plans, roles, config, engine)
    return plans


def read_pools(config: Config) -> dict[str, PoolSettings]:
    """Return the pools that `cluster.pools` lists, by name; none where it is empty or `auto`.

    Raises ConfigError for a pool that cannot be read.
    """
    listed = {} if config.cluster.pools == "auto" else config.cluster.pools
    return {name: _read_pool(spelled, f"cluster.pools.{name}") for name, spelled in listed.items()}


def _read_pool(spelled: Any, where: str) -> PoolSettings:
    if not isinstance(spelled, (list, tuple, Mapping)):
        raise ConfigError(
            f"{where} = {spelled!r} must be a list of roles, as [actor, ref], or a mapping, as "
            "{roles: [actor, ref], workers: 2}"
        )
    return build(PoolSettings, spelled if isinstance(spelled, Mapping) else {"roles": spelled}, where)


def _planned(name: str, asked: PoolSettings, config: Config) -> PoolPlan:
    cluster = config.cluster
    # The defaults are those of models; a pool of reward functions alone is as large as without pools.
    workers, cpus, gpus = cluster.workers, cluster.cpus_per_worker, cluster.gpus_per_worker
    if asked.roles == [REWARD_WORKERS]:
        workers, cpus, gpus = config.reward.workers, 1, 0.0
    return PoolPlan(
        name=name,
        roles=tuple(asked.roles),
        workers=workers if asked.workers is None else asked.workers,
        cpus_per_worker=cpus if asked.cpus_per_worker is None else asked.cpus_per_worker,
        gpus_per_worker=gpus if asked.gpus_per_worker is None else asked.gpus_per_worker,
        node=asked.node,
        colocate=asked.colocate or cluster.colocate,
    )


def restrict_to_roles(config: Config, roles: Mapping[str, Role]) -> Config:
    """Return the config with pools for these roles alone, for who runs some of a run's roles, none of them training."""
    kept: dict[str, Any] = {}
    for name, pool in read_pools(config).items():
        if here := [role for role in pool.roles if role in roles or role == REWARD_WORKERS]:
            kept[name] = {**vars(pool), "roles": here}
    layouts = {name: layout for name, layout in config.engine.layouts.items() if name in roles}
    return replace(
        config,
        cluster=replace(config.cluster, pools=kept),
        engine=replace(config.engine, layouts=layouts),
        trainer=replace(config.trainer, rollouts_ahead=0),
    )


def check_plans(
    plans: Sequence[PoolPlan], roles: Mapping[str, Role], config: Config, engine: TrainEngineSpec | None = None
) -> None:
    """Raise ConfigError for plans that cannot be: a role in no pool or in two, an unknown one, places of no use."""
    home: dict[str, str] = {}
    for pool in plans:
        if not pool.roles:
            raise ConfigError(f"cluster.pools.{pool.name} lists no role; list one, or leave the pool out")
        for name in pool.roles:
            if name not in roles and name not in (REWARD_WORKERS, ROLLOUT):
                known = [*roles, REWARD_WORKERS, ROLLOUT]
                raise ConfigError(
                    f"cluster.pools.{pool.name} lists {name!r}, which this run has not.{did_you_mean(name, known)} "
                    f"Its roles: {', '.join(roles) or 'none'}; besides them a pool may list "
                    f"{REWARD_WORKERS} and {ROLLOUT}"
                )
            if name in home:
                twice = f"pool {pool.name} twice" if home[name] == pool.name else f"pools {home[name]} and {pool.name}"
                raise ConfigError(f"cluster.pools: {name!r} is in {twice}; it can be in one, once")
            home[name] = pool.name
        _check_places(pool, in_process=config.cluster.executor == "in_process")
    if unknown := [name for name in config.engine.layouts if name not in roles]:
        raise ConfigError(
            f"engine.layouts has {unknown[0]!r}, which this run has not.{did_you_mean(unknown[0], roles)} "
            f"Its roles: {', '.join(roles) or 'none'}"
        )
    if missing := [name for name in roles if name not in home]:
        raise ConfigError(
            f"cluster.pools has no place for {', '.join(missing)}; add each to one of the pools "
            f"{', '.join(pool.name for pool in plans)}, or to one more"
        )
    _check_rollout(home, roles, config.trainer.rollouts_ahead)
    for pool in plans:
        _check_layout(pool, roles, config, engine, sampled_elsewhere=ROLLOUT in home)
        if ROLLOUT in pool.roles:
            _check_shards(pool, config)


def _check_layout(
    pool: PoolPlan,
    roles: Mapping[str, Role],
    config: Config,
    engine: TrainEngineSpec | None,
    *,
    sampled_elsewhere: bool,
) -> None:
    models = [name for name in pool.roles if name in roles]
    if not models:
        return
    try:
        for name in models:
            layout = layout_of(engine_of(config.engine, name), pool.workers)
            if engine is not None:
                _check_engine_layout(engine, layout, config)
            check_model_layout(replace(config.model, path=roles[name].model or config.model.path), layout)
            if roles[name].generates and not sampled_elsewhere:
                GenerationLayout(layout, tp=config.rollout.tp)
    except ConfigError as error:
        raise ConfigError(f"pool {pool.name}, {', '.join(models)}: {error}") from None
    for name in models:
        leader = roles[name].follows
        if leader in models and engine_of(config.engine, name) != engine_of(config.engine, leader):
            raise ConfigError(
                f"pool {pool.name}: {name} follows {leader} and takes over its weights place by place, so "
                f"engine.layouts must give both the same [pp, tp]; or put {name} into another pool"
            )


def _check_engine_layout(engine: TrainEngineSpec, layout: Layout, config: Config) -> None:
    if not engine.capabilities.layouts and layout.world_size > 1:
        raise ConfigError(
            f"engine={engine.name} trains a model in one process, not on {layout.world_size} workers: set "
            "cluster.workers=1, or choose another engine"
        )
    if engine.check_layout is not None:
        engine.check_layout(config.sections.get(f"engine.{engine.name}"), layout)


def _check_shards(pool: PoolPlan, config: Config) -> None:
    """Check `rollout.tp` on a pool of copies, which have layouts of their own."""
    shards = config.rollout.tp
    if pool.workers % shards:
        possible = ", ".join(str(n) for n in range(1, pool.workers + 1) if pool.workers % n == 0)
        raise ConfigError(
            f"pool {pool.name}, {ROLLOUT}: rollout.tp={shards} does not divide its {pool.workers} workers; it can be "
            f"{possible}"
        )


def _check_places(pool: PoolPlan, *, in_process: bool) -> None:
    where, gpus, models = f"cluster.pools.{pool.name}", pool.gpus_per_worker, pool.process_sets
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"{where}: gpus_per_worker = {gpus} must be a whole number or a share below 1")
    if gpus > 1 and len(models) > 1:
        raise ConfigError(
            f"{where}: {', '.join(pool.roles)} are processes of their own (colocate: fractional) and cannot share "
            f"places of {gpus:g} GPUs; set gpus_per_worker to 1 or less with more workers, or colocate: fused"
        )
    if in_process and models and pool.workers != 1:
        raise ConfigError(
            f"{where}: workers = {pool.workers}, but cluster.executor = in_process runs engines in this process, so it "
            "must be 1; leave it out, or choose cluster=local for Ray"
        )


def _check_rollout(home: Mapping[str, str], roles: Mapping[str, Role], ahead: int) -> None:
    if ROLLOUT not in home:
        if ahead:
            raise ConfigError(
                f"trainer.rollouts_ahead = {ahead} samples on a pool of its own beside training: add one, as "
                f"cluster.pools={{main: [{', '.join(roles)}], side: [{ROLLOUT}]}}, or set trainer.rollouts_ahead=0"
            )
        return
    sampled = sampled_role(roles)
    if home[sampled] == home[ROLLOUT]:
        raise ConfigError(
            f"cluster.pools.{home[ROLLOUT]} lists {ROLLOUT} beside {sampled}, which samples there by itself: leave "
            f"{ROLLOUT} out, or put it into another pool"
        )


def sampled_role(roles: Mapping[str, Role]) -> str:
    """Return the role that ROLLOUT is a copy of. Raises ConfigError unless just one role trains and generates."""
    both = [name for name, role in roles.items() if role.trains and role.generates]
    if len(both) != 1:
        raise ConfigError(
            f"cluster.pools lists {ROLLOUT}, the sampling copy of the one role that trains and generates, but of this "
            f"run's roles {', '.join(roles) or '(none)'} these do both: {', '.join(both) or 'none'}; leave it out"
        )
    return both[0]
