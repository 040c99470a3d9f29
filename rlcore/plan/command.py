"""From a config to plans: what `rlcore plan` and `cluster.pools=auto` do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlcore.config import Config
from rlcore.config.build import build
from rlcore.engine.parallel.model_shape import engine_of
from rlcore.engine.parallel.model_size import size_of
from rlcore.errors import ConfigError
from rlcore.plan.devices import devices
from rlcore.plan.overrides import experiment, values
from rlcore.plan.problem import Devices, Fixed, Objective, Problem
from rlcore.plan.record import record
from rlcore.plan.search import Plan, search
from rlcore.plan.workload import Workload
from rlcore.plugins import Role
from rlcore.roles.placement import REWARD_WORKERS, ROLLOUT, PoolSettings, sampled_role
from rlcore.roles.settings import resolve_roles

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


def make_plans(
    config: Config, plugins: PluginManager, *, lengths: Sequence[int] = (), objective: Objective = "time"
) -> list[Plan]:
    """Return the best plan of each placement for a run of this config, the best first.

    `lengths`: response lengths that are all as likely, in tokens; without any all have `rollout.response_len`. What
    `cluster.pools`, `engine.pp`, `engine.tp`, `engine.layouts` and `rollout.tp` say is kept. Raises ConfigError when
    nothing fits, and for what cannot be planned.
    """
    if not config.algorithm:
        raise ConfigError(f"no algorithm is chosen: add algo=NAME, one of {', '.join(plugins.algorithms())}")
    return search(problem_of(config, plugins, devices(config.cluster), lengths=lengths, objective=objective))


def problem_of(
    config: Config,
    plugins: PluginManager,
    found: tuple[Devices, ...],
    *,
    lengths: Sequence[int] = (),
    objective: Objective = "time",
) -> Problem:
    """Return the planning problem of a config on these devices."""
    algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
    algorithm.check(config)
    roles = resolve_roles(algorithm.roles(), config)
    sizes = {name: _size(role, config) for name, role in _leaders_first(roles).items()}
    problem = Problem(
        record(config, plugins),
        sizes,
        frozenset(name for name, role in roles.items() if role.trains),
        Workload.of(config, plugins, tuple(lengths)),
        found,
        {name: role.follows for name, role in roles.items() if role.follows is not None},
        objective=objective,
        rollout=plugins.rollout_engines()[config.rollout.name].capabilities,
    )
    ahead = bool(config.trainer.rollouts_ahead) or ROLLOUT in _listed(config)
    if ahead:
        problem = problem.sampled_apart(sampled_role(roles))
    return replace(problem, fixed=_fixed(config, problem))


def _size(role: Role, config: Config) -> Any:
    model = replace(config.model, path=role.model or config.model.path)
    return size_of(model, role.kind.head)


def _leaders_first(roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return the roles with those that follow others after them; none follows a role that follows."""
    return dict(sorted(roles.items(), key=lambda item: item[1].follows is not None))


def _listed(config: Config) -> list[str]:
    return [name for pool in _pools(config).values() for name in pool.roles]


def _pools(config: Config) -> dict[str, PoolSettings]:
    spelled = {} if config.cluster.pools == "auto" else config.cluster.pools
    return {
        name: build(PoolSettings, pool if isinstance(pool, Mapping) else {"roles": pool}, f"cluster.pools.{name}")
        for name, pool in spelled.items()
    }


def _fixed(config: Config, problem: Problem) -> Fixed:
    """Return what the config has chosen already. Raises ConfigError for choices that cannot be."""
    engine = config.engine
    laid_out = {name: engine_of(engine, name) for name in engine.layouts}
    chosen = {name: (own.pp, own.tp) for name, own in laid_out.items()}
    if engine.pp > 1 or engine.tp > 1:
        chosen = {name: (engine.pp, engine.tp) for name in problem.roles if name != ROLLOUT} | chosen
    pools: dict[frozenset[str], int | None] = {}
    for name, pool in _pools(config).items():
        if unknown := [role for role in pool.roles if role not in (*problem.roles, REWARD_WORKERS)]:
            raise ConfigError(
                f"cluster.pools.{name} lists {unknown[0]!r}; the run's roles are {', '.join(problem.roles)}"
            )
        if models := frozenset(pool.roles) - {REWARD_WORKERS}:
            pools[models] = pool.workers
    if pools:
        listed = [role for models in pools for role in models]
        if missing := [role for role in problem.roles if role not in listed]:
            raise ConfigError(
                f"cluster.pools has no place for {', '.join(missing)}; add each to a pool, or leave all out"
            )
        total, asked = sum(each.count for each in problem.devices), sum(filter(None, pools.values()))
        if asked > total:
            raise ConfigError(
                f"cluster.pools asks for {asked} devices, {asked - total} more than the {total} that are planned for: "
                f"make pools smaller, or set cluster.gpus={asked}"
            )
        sizes = sorted({count for each in problem.devices for count in each.allocations})
        if odd := [count for count in pools.values() if count is not None and count not in sizes]:
            raise ConfigError(
                f"cluster.pools has a pool of {odd[0]} workers; a plan has pools of {', '.join(map(str, sizes))}: "
                "powers of two below a machine, and whole machines"
            )
    return Fixed(pools or None, chosen, config.rollout.tp if config.rollout.tp > 1 else None)


def read_lengths(spelled: str, most: int) -> list[int]:
    """Read response lengths: numbers with commas between, or a file of them. Raises ConfigError for anything else."""
    text = spelled
    if not spelled.replace(",", "").replace(" ", "").isdigit():
        try:
            text = Path(spelled).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--lengths {spelled}: neither numbers, as 200,400,900, nor a file: {error}") from error
    parts = text.replace(",", " ").split()
    wrong = [part for part in parts if not part.isdigit() or not 1 <= int(part) <= most]
    if wrong or not parts:
        what = repr(wrong[0]) if wrong else "nothing"
        raise ConfigError(
            f"--lengths {spelled}: {what} is no response length; they are whole numbers from 1 to "
            f"rollout.response_len={most}"
        )
    lengths = sorted(map(int, parts))
    # A hundred quantiles say as much.
    if len(lengths) > 100:
        lengths = [lengths[math.floor((index + 0.5) * len(lengths) / 100)] for index in range(100)]
    return lengths


def apply(plan: Plan, config: Config) -> Config:
    """Return the config that runs the plan."""
    return config.with_values(values(plan, config))


def experiment_file(name: str) -> Path:
    """Return the path of an experiment to be written. Raises ConfigError for one that is no YAML file."""
    if Path(name).suffix != ".yaml":
        raise ConfigError(f"--save {name}: an experiment is a file NAME.yaml, as configs/experiment/big.yaml")
    return Path(name)


def save(plan: Plan, config: Config, path: Path) -> None:
    """Write the plan as an experiment, `experiment=NAME` in a folder DIR/experiment for `--config-dir DIR`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(experiment(plan, config), sort_keys=False, width=110)
    path.write_text(
        f"# @package _global_\n# {plan.seconds:.3g} s a step, by `rlcore plan`.\n{content}", encoding="utf-8"
    )
