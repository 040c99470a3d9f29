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
"""In a pool: a copy of the role that trains and generates, which does its sampling."""

Colocation = Literal["fused", "fractional"]


@dataclass(frozen=True)
class PoolSettings:
    """A pool as `cluster.pools` may spell it out; a list is short for its `roles`."""

    roles: list[str] = option(..., "what is on the pool: roles, `reward`, `rollout`, workers of plugins")
    workers: int | None = option(None, "places, each for one rank (default: cluster.workers)", min=1)
    cpus_per_worker: int | None = option(None, "cores of a place (default: cluster.cpus_per_worker)", min=1)
    gpus_per_worker: float | None = option(None, "GPUs of a place (default: cluster.gpus_per_worker)", min=0.0)
    node: str | None = option(None, "resource of Ray that the pool's nodes have (default: any node)")
    colocate: Colocation | None = option(None, "how the roles share the places (default: cluster.colocate)")


@dataclass(frozen=True)
class PoolPlan:
    """A pool of `workers` places, and the names of the roles, REWARD_WORKERS and ROLLOUT among them, that are on it.

    `fused` roles are workers in one process a place, `fractional` ones have a process each and take turns. `groups` are
    the workers of plugins on the pool, each with a process on every place. `node` is a resource of Ray that every node
    of the pool has; None is any node.
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
    """Return the pools that `cluster.pools` lists, by name; none if it is empty or `auto`.

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
    """Return the role that ROLLOUT is a copy of. Raises ConfigError unless just one role trains and generates."""
    both = [name for name, role in roles.items() if role.trains and role.generates]
    if len(both) != 1:
        raise ConfigError(
            f"cluster.pools lists {ROLLOUT}, the sampling copy of the one role that trains and generates, but of this "
            f"run's roles {', '.join(roles) or '(none)'} these do both: {', '.join(both) or 'none'}; leave it out"
        )
    return both[0]
