"""Starts the workers of all roles on their pools, and makes the roles' handles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class RoleStart:
    """Everything that roles are started from besides their places. `episodes`: the setup of the run's environment."""

    config: Config
    plugins: PluginManager
    roles: Mapping[str, Role]
    clock: StepClock
    episodes: Episodes | None = None

    def setups(self, sampled: str | None) -> dict[str, RoleSetup]:
        """Return each role's setup. `sampled`: the role with a rollout pool; its own workers then do not sample."""
        setups = {name: self._setup(name) for name in self.roles}
        if sampled is not None:
            setups[ROLLOUT] = setups[sampled]
            # The trained role then needs no rollout engine, nor its memory.
            setups[sampled] = replace(setups[sampled], role=replace(self.roles[sampled], generates=False))
        return setups

    def _setup(self, name: str) -> RoleSetup:
        role, config = self.roles[name], role_config(self.config, name, self.roles[name])
        train = self.plugins.train_engines()[config.engine.name]
        rollout = self.plugins.rollout_engines()[config.rollout.name]
        leads = any(other.follows == name for other in self.roles.values())
        return RoleSetup(
            role=role,
            model=config.model,
            engine=config.engine,
            rollout=config.rollout,
            train_engine=train,
            rollout_engine=rollout,
            train_config=own_section(config, f"engine.{train.name}", train.config_class),
            rollout_config=own_section(config, f"rollout.{rollout.name}", rollout.config_class),
            seed=config.trainer.seed,
            total_steps=config.trainer.total_steps,
            deterministic=config.trainer.deterministic,
            frozen=not (role.trains or role.generates or role.follows or leads),
            reads_text=reads_text(role, self.config),
            row_tokens=config.data.prompt_len + config.rollout.response_len,
        )

    def handle(
        self, name: str, group: WorkerGroup, *, leader: WorkerGroup | None, rollout: WorkerGroup | None
    ) -> RoleHandle:
        """Return the handle of the role's kind.

        `group`: the role's workers. `leader`: those of the role that it follows in other processes. `rollout`: those of
        its rollout pool.
        """
        role = self.roles[name]
        config = role_config(self.config, name, role)
        if role.kind == CRITIC:
            return CriticHandle(name, role, group, config, self.clock, leader=leader)
        if role.kind == REWARD:
            reads = reads_text(role, self.config)
            return RewardHandle(name, role, group, config, self.clock, leader=leader, reads_text=reads)
        return PolicyHandle(
            name, role, group, config, self.clock, leader=leader, rollout=rollout, episodes=self.episodes
        )


def start_roles(
    start: RoleStart,
    executor: Executor,
    pools: Sequence[OpenPool],
    *,
    extra: Sequence[ProcessRequest] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[dict[str, RoleHandle], dict[str, WorkerGroup]]:
    """Start the workers of all roles on their pools, load their models, and return the handles.

    extra: further processes to start at the same time; their groups are returned too, by name. If their worker class
    has a non-blocking method `start`, it runs while the models load, and its errors come first.
    meanwhile: called while the processes start, before any worker is constructed; its errors pass.
    """
    sampled = sampled_role(start.roles) if any(ROLLOUT in planned.roles for planned, _ in pools) else None
    setups = start.setups(sampled)
    process_sets: list[tuple[ResourcePool, Sequence[str]]] = []
    for planned, pool in pools:
        process_sets += [(pool, names) for names in planned.process_sets]
    for _, names in process_sets:
        setups |= {name: replace(setups[name], base_of=base_of(name, names, setups)) for name in names}
    models = [_process_request(pool, names, setups) for pool, names in process_sets]
    groups: dict[str, WorkerGroup] = {}
    # Ray starts few processes at a time; those with models have the most to import.
    requests = [*models, *extra]
    for started in executor.worker_groups(requests, meanwhile=meanwhile):
        groups.update(started)
    # Extra processes first: an error in their start (a reward function, a judge) shows before models are loaded.
    _load([*extra, *models], groups, {name for name, setup in setups.items() if setup.base_of is not None})
    # By role, the names of the roles in the same processes.
    process_mates: dict[str, Sequence[str]] = {}
    for _, names in process_sets:
        process_mates |= dict.fromkeys(names, names)
    handles = {}
    for name, role in start.roles.items():
        handles[name] = start.handle(
            name,
            groups[name],
            leader=_remote_leader(role, process_mates[name], groups),
            rollout=groups[ROLLOUT] if name == sampled else None,
        )
    further: dict[str, WorkerGroup] = {}
    for request in extra:
        further |= {name: groups[name] for name in request.classes}
    return handles, further


def base_of(name: str, mates: Sequence[str], setups: Mapping[str, RoleSetup]) -> str | None:
    """Return the role among `mates`, those in the same processes, whose model without its adapter is this role's.

    A frozen role then needs no memory of its own. None: it loads its model.
    """
    own = setups[name]
    if not own.frozen:
        return None
    for mate in mates:
        other = setups[mate]
        same = own.role.kind == other.role.kind and own.train_engine == other.train_engine
        same &= own.train_config == other.train_config and own.rollout.temperature == other.rollout.temperature
        same &= (
            replace(own.model, lora=other.model.lora) == other.model and own.model.lora.path == other.model.lora.path
        )
        same &= (own.engine.pp, own.engine.tp) == (other.engine.pp, other.engine.tp)
        if same and other.role.trains and other.model.lora.is_on and (own.engine.pp == 1 or not own.model.lora.path):
            return mate
    return None


def _remote_leader(role: Role, mates: Sequence[str], groups: Mapping[str, WorkerGroup]) -> WorkerGroup | None:
    """Return the workers of the followed role, unless it shares its processes with this role (`mates`)."""
    if role.follows is None or role.follows in mates:
        return None
    return groups[role.follows]


def _load(requests: Sequence[ProcessRequest], groups: Mapping[str, WorkerGroup], borrowing: Collection[str]) -> None:
    """Call the non-blocking `start` of all workers that have one, and wait for all of them.

    borrowing: the roles that compute with the weights of another role.
    """
    loading = []
    for request in requests:
        for name, made in request.classes.items():
            registration = registration_of(made.cls, "start")
            if registration is not None and not registration.blocking:
                loading.append(name)
    # A role on another one's weights starts after it.
    for name in sorted(loading, key=lambda name: name in borrowing):
        groups[name].start()
    wait_for([future for name in loading for future in groups[name].outstanding()])


def _process_request(pool: ResourcePool, names: Sequence[str], setups: Mapping[str, RoleSetup]) -> ProcessRequest:
    """Return the request for the shared processes of some roles, one on each place of the pool."""
    kinds = {name: SamplingWorker if name == ROLLOUT else ModelWorker for name in names}
    classes = {name: ClassWithInitArgs(kind, setups[name]) for name, kind in kinds.items()}
    return ProcessRequest(pool, classes, "-".join(names))
