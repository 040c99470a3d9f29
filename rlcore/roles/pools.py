"""Pools: places for worker processes, and the roles on them."""

# ruff: noqa: RUF009  (`option` declares a config field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.config import Config, option
from rlcore.config.build import build
from rlcore.errors import ConfigError
from rlcore.plugins import Role
from rlcore.workers import Executor, ResourcePool

REWARD_WORKERS = "reward"
"""In a pool: the workers of the reward functions, as processes of their own without GPUs."""
ROLLOUT = "rollout"
"""In a pool: a copy of the role that trains and generates; it does the sampling."""

Colocation = Literal["fused", "fractional"]


@dataclass(frozen=True)
class PoolSettings:
    """The settings of a pool in `cluster.pools`; a list is short for `roles`."""

    roles: list[str] = option(..., "names of roles, `reward`, `rollout`, and workers of plugins")
    workers: int | None = option(None, "places, each for one rank (default: cluster.workers)", min=1)
    cpus_per_worker: int | None = option(None, "cores of a place (default: cluster.cpus_per_worker)", min=1)
    gpus_per_worker: float | None = option(None, "GPUs of a place (default: cluster.gpus_per_worker)", min=0.0)
    node: str | None = option(None, "Ray resource that selects the pool's nodes (default: any node)")
    colocate: Colocation | None = option(None, "how the roles share the places (default: cluster.colocate)")


@dataclass(frozen=True)
class PoolPlan:
    """A pool of `workers` places, and the names of its roles, which may include REWARD_WORKERS and ROLLOUT.

    `fused` roles share one process per place; `fractional` roles have a process each and take turns. `groups` are the
    workers of plugins on the pool, with a process of each on every place. `node` is a Ray resource of every node of the
    pool; None: any node.
    """

    name: str
    roles: tuple[str, ...]
    workers: int = 1
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    node: str | None = None
    colocate: Colocation = "fused"
    groups: tuple[str, ...] = ()

    @property
    def process_sets(self) -> list[tuple[str, ...]]:
        """The models of the pool; those in one tuple share processes."""
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


OpenPool = tuple[PoolPlan, ResourcePool]
"""A planned pool, and its places."""


def read_pools(config: Config) -> dict[str, PoolSettings]:
    """Return the pools in `cluster.pools` by name; none if it is empty or `auto`.

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


def sampled_role(roles: Mapping[str, Role]) -> str:
    """Return the role that ROLLOUT copies. Raises ConfigError unless exactly one role trains and generates."""
    both = [name for name, role in roles.items() if role.trains and role.generates]
    if len(both) != 1:
        raise ConfigError(
            f"cluster.pools lists {ROLLOUT}, a copy of the role that trains and generates, so exactly one role must do "
            f"both. Of this run's roles {', '.join(roles) or '(none)'} these do: {', '.join(both) or 'none'}; leave "
            f"{ROLLOUT} out"
        )
    return both[0]
