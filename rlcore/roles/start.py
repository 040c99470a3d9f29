"""Starts the workers of all roles on their pools, and makes the roles' handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.engine.rollout import Episodes
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.plugins import CRITIC, REWARD, Role
from rlcore.roles.handles import CriticHandle, PolicyHandle, RewardHandle, RoleHandle, StepClock
from rlcore.roles.pools import ROLLOUT, OpenPool, sampled_role
from rlcore.roles.settings import own_section, reads_text, role_config
from rlcore.workers import ClassWithInitArgs, Executor, ResourcePool, WorkerGroup, wait_for
from rlcore.workers.executor import ProcessRequest
from rlcore.workers.worker import registration_of

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


def start_roles(
    config: Config,
    executor: Executor,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    clock: StepClock,
    pools: Sequence[OpenPool],
    *,
    episodes: Episodes | None = None,
    extra: Sequence[ProcessRequest] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[dict[str, RoleHandle], dict[str, WorkerGroup]]:
    """Start the workers of all roles on their pools, load their models, and return the handles.

    episodes: the setup of the run's environment.
    extra: further processes to start at the same time; their groups are returned too, by name. If their worker class
    has a non-blocking method `start`, it runs while the models load, and its errors come first.
    meanwhile: called while the processes start, before any worker is constructed; its errors pass.
    """
    sampled = sampled_role(roles) if any(ROLLOUT in planned.roles for planned, _ in pools) else None
    setups = _setups(roles, config, plugins, sampled)
    process_sets: list[tuple[ResourcePool, Sequence[str]]] = []
    for planned, pool in pools:
        process_sets += [(pool, names) for names in planned.process_sets]
    models = [_process_request(pool, names, setups) for pool, names in process_sets]
    groups: dict[str, WorkerGroup] = {}
    # Ray starts few processes at a time; those with models have the most to import.
    requests = [*models, *extra]
    for started in executor.worker_groups(requests, meanwhile=meanwhile):
        groups.update(started)
    # Extra processes first: an error in their start (a reward function, a judge) shows before models are loaded.
    _load([*extra, *models], groups)
    # By role, the names of the roles in the same processes.
    process_mates: dict[str, Sequence[str]] = {}
    for _, names in process_sets:
        process_mates |= dict.fromkeys(names, names)
    handles = {}
    for name, role in roles.items():
        handles[name] = _handle(
            name,
            role,
            groups[name],
            role_config(config, name, role),
            clock,
            leader=_remote_leader(role, process_mates[name], groups),
            rollout=groups[ROLLOUT] if name == sampled else None,
            episodes=episodes,
            reads_text=setups[name].reads_text,
        )
    further: dict[str, WorkerGroup] = {}
    for request in extra:
        further |= {name: groups[name] for name in request.classes}
    return handles, further


def _setups(
    roles: Mapping[str, Role], config: Config, plugins: PluginManager, sampled: str | None
) -> dict[str, RoleSetup]:
    """Return each role's setup. `sampled`: the role with a rollout pool; its own workers then do not sample."""
    leaders = {role.follows for role in roles.values()}
    setups = {name: _setup(name, role, config, plugins, name in leaders) for name, role in roles.items()}
    if sampled is not None:
        setups[ROLLOUT] = setups[sampled]
        # The trained role then needs no rollout engine, nor its memory.
        setups[sampled] = replace(setups[sampled], role=replace(roles[sampled], generates=False))
    return setups


def _remote_leader(role: Role, mates: Sequence[str], groups: Mapping[str, WorkerGroup]) -> WorkerGroup | None:
    """Return the workers of the followed role, unless it shares its processes with this role (`mates`)."""
    if role.follows is None or role.follows in mates:
        return None
    return groups[role.follows]


def _load(requests: Sequence[ProcessRequest], groups: Mapping[str, WorkerGroup]) -> None:
    """Call the non-blocking `start` of all workers that have one, and wait for all of them."""
    loading = []
    for request in requests:
        for name, made in request.classes.items():
            registration = registration_of(made.cls, "start")
            if registration is not None and not registration.blocking:
                groups[name].start()
                loading.append(groups[name])
    wait_for([future for group in loading for future in group.outstanding()])


def _setup(name: str, role: Role, config: Config, plugins: PluginManager, leads: bool) -> RoleSetup:
    own = role_config(config, name, role)
    train, rollout = plugins.train_engines()[own.engine.name], plugins.rollout_engines()[own.rollout.name]
    return RoleSetup(
        role=role,
        model=own.model,
        engine=own.engine,
        rollout=own.rollout,
        train_engine=train,
        rollout_engine=rollout,
        train_config=own_section(own, f"engine.{train.name}", train.config_class),
        rollout_config=own_section(own, f"rollout.{rollout.name}", rollout.config_class),
        seed=own.trainer.seed,
        total_steps=own.trainer.total_steps,
        deterministic=own.trainer.deterministic,
        frozen=not (role.trains or role.generates or role.follows or leads),
        reads_text=reads_text(role, config),
        row_tokens=own.data.prompt_len + own.rollout.response_len,
    )


def _process_request(pool: ResourcePool, names: Sequence[str], setups: Mapping[str, RoleSetup]) -> ProcessRequest:
    """Return the request for the shared processes of some roles, one on each place of the pool."""
    kinds = {name: SamplingWorker if name == ROLLOUT else ModelWorker for name in names}
    classes = {name: ClassWithInitArgs(kind, setups[name]) for name, kind in kinds.items()}
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
    episodes: Episodes | None,
    reads_text: bool,
) -> RoleHandle:
    """Return the handle of the role's kind."""
    if role.kind == CRITIC:
        return CriticHandle(name, role, group, config, clock, leader=leader)
    if role.kind == REWARD:
        return RewardHandle(name, role, group, config, clock, leader=leader, reads_text=reads_text)
    return PolicyHandle(name, role, group, config, clock, leader=leader, rollout=rollout, episodes=episodes)
