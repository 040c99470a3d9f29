"""Makes plans from a config, for `rlcore plan` and `cluster.pools=auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from rlcore import Config, ConfigError, Role
from rlcore.engine import engine_of
from rlcore.planning import REWARD_WORKERS, ROLLOUT, read_pools, role_config, run_roles, sampled_role
from rlcore_plugin_plan.devices import devices
from rlcore_plugin_plan.model_size import ModelSize, size_of
from rlcore_plugin_plan.problem import Devices, Fixed, Objective, OwnSettings, Problem
from rlcore_plugin_plan.record import record
from rlcore_plugin_plan.search import Plan, fewest, search
from rlcore_plugin_plan.workload import Lengths, Workload

if TYPE_CHECKING:
    from rlcore import PluginManager


def make_plans(
    config: Config, plugins: PluginManager, *, lengths: Sequence[int] = (), objective: Objective = "time"
) -> list[Plan]:
    """Return the best plan of each placement for a run of this config, the best first.

    `lengths`: equally likely response lengths, in tokens; default: `rollout.response_len` for all. Values of
    `cluster.pools`, `engine.pp`, `engine.tp`, `engine.layouts` and `rollout.tp` stay as they are. Raises ConfigError
    when nothing fits, and for a config that cannot be planned.
    """
    problem = problem_of(config, plugins, devices(config), lengths=lengths, objective=objective)
    if config.engine.micro_batch_tokens == "auto" and not problem.devices[0].profile.cpu:
        problem = _with_fitting_micro_batches(problem)
    return search(problem)


def _with_fitting_micro_batches(problem: Problem) -> Problem:
    """Return the problem with the largest micro-batches that fit, as a run measures them; as it is if none fit."""
    tokens = problem.work.micro_batch_tokens
    while tokens > problem.work.lengths.row:
        fitting = replace(problem, work=replace(problem.work, micro_batch_tokens=tokens))
        if fewest(fitting) is not None:
            return fitting
        tokens //= 2
    return problem


def problem_of(
    config: Config,
    plugins: PluginManager,
    found: tuple[Devices, ...],
    *,
    lengths: Sequence[int] = (),
    objective: Objective = "time",
) -> Problem:
    """Return the planning problem of a config on these devices."""
    roles = run_roles(config, plugins)
    sizes = {name: _size(role, config) for name, role in _leaders_first(roles).items()}
    configs = {name: role_config(config, name, role) for name, role in roles.items()}
    leaders = {name: role.follows for name, role in roles.items() if role.follows is not None}
    tied = {*leaders, *leaders.values()}
    work = Workload.of(config, plugins, tuple(lengths), cpu=found[0].profile.cpu)
    sampled = [configs[name].rollout for name, role in roles.items() if role.generates]
    if sampled and not lengths:  # all roles read the rows that the first one samples
        work = replace(work, lengths=Lengths(config.data.prompt_len, (sampled[0].response_len,)))
    problem = Problem(
        record(config, plugins, roles),
        sizes,
        frozenset(name for name, role in roles.items() if role.trains),
        work,
        found,
        leaders,
        objective=objective,
        rollout=plugins.rollout_engines()[config.rollout.name].capabilities,
        train=plugins.train_engines()[config.engine.name].capabilities,
        own=_own_settings(roles, config, configs, plugins, work, tuple(lengths), cpu=found[0].profile.cpu),
        frozen=frozenset(n for n, role in roles.items() if not (role.trains or role.generates or n in tied)),
    )
    ahead = bool(config.trainer.rollouts_ahead) or any(ROLLOUT in pool.roles for pool in read_pools(config).values())
    if ahead:
        problem = problem.sampled_apart(sampled_role(roles))
    return replace(problem, fixed=_fixed(config, problem, _fixed_generation(configs, roles, problem)))


def _own_settings(
    roles: Mapping[str, Role],
    config: Config,
    configs: Mapping[str, Config],
    plugins: PluginManager,
    work: Workload,
    lengths: tuple[int, ...],
    *,
    cpu: bool,
) -> dict[str, OwnSettings]:
    """Return the settings of the roles whose precision, train engine or rollout keys are not the run's."""
    found = {}
    for name, own in configs.items():
        if (own.model.dtype, own.engine.name, own.rollout) == (config.model.dtype, config.engine.name, config.rollout):
            continue
        mine = Workload.of(own, plugins, lengths, cpu=cpu)
        if not roles[name].generates:
            mine = replace(mine, lengths=work.lengths)
        found[name] = OwnSettings(
            own.engine.name,
            plugins.train_engines()[own.engine.name].capabilities,
            plugins.rollout_engines()[own.rollout.name].capabilities,
            {f.name: getattr(mine, f.name) for f in fields(mine) if getattr(mine, f.name) != getattr(work, f.name)},
        )
    return found


def _size(role: Role, config: Config) -> ModelSize:
    return size_of(role.model or config.model.path, config.model.trust_remote_code, role.kind.head)


def _leaders_first(roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return the roles, followers last. One pass is enough, as no role follows a follower."""
    return dict(sorted(roles.items(), key=lambda item: item[1].follows is not None))


def _fixed(config: Config, problem: Problem, generation_tp: Mapping[str, int]) -> Fixed:
    """Return the choices that the config has made. Raises ConfigError for impossible choices."""
    pools = _fixed_pools(config, problem)
    if pools:
        _check_places(pools, problem)
        _check_sizes(pools, problem)
    return Fixed(pools or None, _fixed_layouts(config, problem), generation_tp)


def _fixed_generation(configs: Mapping[str, Config], roles: Mapping[str, Role], problem: Problem) -> dict[str, int]:
    """Return `rollout.tp` of the roles for which it is given; a pool of sampling copies has its role's."""
    given = {name: configs[name].rollout.tp for name in roles if configs[name].rollout.tp > 1}
    if ROLLOUT in problem.roles and (sampled := sampled_role(roles)) in given:
        given[ROLLOUT] = given[sampled]
    return given


def _fixed_layouts(config: Config, problem: Problem) -> dict[str, tuple[int, int]]:
    engine = config.engine
    layouts: dict[str, tuple[int, int]] = {}
    if engine.pp > 1 or engine.tp > 1:
        layouts = {name: (engine.pp, engine.tp) for name in problem.roles if name != ROLLOUT}
    for name in engine.layouts:
        own = engine_of(engine, name)
        layouts[name] = (own.pp, own.tp)
    return layouts


def _fixed_pools(config: Config, problem: Problem) -> dict[frozenset[str], int | None]:
    """Return the number of workers by the models of each pool, None if the config leaves it open."""
    pools: dict[frozenset[str], int | None] = {}
    for name, pool in read_pools(config).items():
        unknown = [role for role in pool.roles if role not in (*problem.roles, REWARD_WORKERS)]
        if unknown:
            raise ConfigError(
                f"cluster.pools.{name} lists {unknown[0]!r}; the run's roles are {', '.join(problem.roles)}"
            )
        models = frozenset(pool.roles) - {REWARD_WORKERS}
        if models:
            pools[models] = pool.workers
    return pools


def _check_places(pools: Mapping[frozenset[str], int | None], problem: Problem) -> None:
    listed = frozenset().union(*pools)
    if missing := [role for role in problem.roles if role not in listed]:
        raise ConfigError(f"cluster.pools lacks {', '.join(missing)}; add each to a pool, or leave cluster.pools empty")


def _check_sizes(pools: Mapping[frozenset[str], int | None], problem: Problem) -> None:
    total, asked = sum(each.count for each in problem.devices), sum(filter(None, pools.values()))
    if asked > total:
        raise ConfigError(
            f"cluster.pools needs {asked} devices, {asked - total} more than the {total} to plan for: "
            f"make pools smaller, or set plan.gpus={asked}"
        )
    sizes = sorted(set().union(*(each.allocations for each in problem.devices)))
    if odd := [count for count in pools.values() if count is not None and count not in sizes]:
        raise ConfigError(
            f"cluster.pools has a pool of {odd[0]} workers; possible sizes are {', '.join(map(str, sizes))}: "
            "powers of two below a machine, and whole machines"
        )
