"""The public interface for plugins that place roles: a run's roles and pools, started roles, and rehearsed steps.

Such a plugin answers `cluster.pools=auto` through the hook `rlcore_place_roles`. Runs on the controller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.config.build import to_plain
from rlcore.config.compose import sections_with_defaults
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import PromptLoader
from rlcore.engine.generators import random_state, set_random_state
from rlcore.engine.worker import ModelWorker
from rlcore.errors import RLCoreError
from rlcore.plugins import DatasetSpec, Role
from rlcore.protocol import DataProto
from rlcore.protocol.columns import Column
from rlcore.protocol.remote import Block, RemoteColumn
from rlcore.rewards.compose import resolve
from rlcore.roles import start
from rlcore.roles.handles import RoleHandle, StepClock
from rlcore.roles.placement import plan_pools
from rlcore.roles.pools import REWARD_WORKERS, ROLLOUT, PoolSettings, read_pools, sampled_role
from rlcore.roles.settings import role_config
from rlcore.training.preflight import preflight
from rlcore.training.run import Run, open_run
from rlcore.workers import ClassWithInitArgs, Executor, Worker
from rlcore.workers.contract import DeclaredResult
from rlcore.workers.gpus import cluster_accelerators
from rlcore.workers.in_process import FinishedCall, InProcess, InProcessExecutor

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager

__all__ = [
    "REWARD_WORKERS",
    "ROLLOUT",
    "PoolSettings",
    "WorkerCall",
    "WorkerObserver",
    "accelerators",
    "changed_values",
    "marks_of",
    "read_pools",
    "rehearse",
    "role_config",
    "run_roles",
    "sampled_role",
    "start_roles",
]


def run_roles(config: Config, plugins: PluginManager) -> dict[str, Role]:
    """Return the roles of a run: its algorithm's, and the reward model of `reward.model`.

    Raises ConfigError for a config that no machine could run; does not check this machine or the pools.
    """
    return dict(preflight(config, plugins, "plan").roles)


def start_roles(
    config: Config, plugins: PluginManager, roles: Mapping[str, Role], executor: Executor
) -> dict[str, RoleHandle]:
    """Start the workers of these roles on the pools of `cluster.pools`, load their models, and return the handles.

    No reward workers are started. The step is 1. Raises ConfigError for pools that do not fit the roles.
    """
    planned = plan_pools(config, roles, plugins.train_engines())
    pools = [(pool, pool.open(executor)) for pool in planned if pool.process_sets]
    started, _ = start.start_roles(start.RoleStart(config, plugins, roles, StepClock(1)), executor, pools)
    return started


def changed_values(config: Config) -> dict[str, Any]:
    """Return the values of a config that differ from their defaults, nested as in a YAML file."""
    changed: dict[str, Any] = {}
    for path, section, standard in sections_with_defaults(config):
        values = {key: value for key, value in to_plain(section).items() if value != standard[key]}
        if values:
            holder = changed
            for part in path.split("."):
                holder = holder.setdefault(part, {})
            holder.update(values)
    for name, settings in config.roles.items():
        given = {key: value for key, value in to_plain(settings).items() if value not in (None, {})}
        changed.setdefault("roles", {})[name] = given
    return changed


def accelerators(config: Config) -> tuple[dict[str, int], int]:
    """Return the devices of the Ray cluster at `cluster.address`: GPUs by Ray's resource for their kind, and cores."""
    return cluster_accelerators(config.cluster)


@dataclass(frozen=True)
class WorkerCall:
    """A call of a worker in a rehearsal. `worker`: the role's name, `reward`, or the name of a plugin's worker group.

    `arguments`: the positional ones, then those by keyword. `declared`: the rows and columns of the result, if the
    method declares them with `gives`. `run()` runs the method and returns its result, or raises its error.
    """

    worker: str
    method: str
    arguments: tuple[Any, ...]
    declared: DeclaredResult | None
    run: Callable[[], Any]


class WorkerObserver(ABC):
    """Observes each call of a worker in a rehearsal, and decides its result."""

    @abstractmethod
    def observe(self, call: WorkerCall) -> tuple[Any, Hashable]:
        """Return the result of a call (from `call.run()`, or made up) and its mark; None: no mark.

        The columns of a DataProto carry the mark into all batches that they become part of.
        """

    @abstractmethod
    def read(self, mark: Hashable) -> None:
        """Record a read of a marked result: of a column of a DataProto, or of any other result as a whole."""


@contextmanager
def rehearse(
    config: Config, plugins: PluginManager, roles: Mapping[str, Role], dataset: DatasetSpec, observer: WorkerObserver
) -> Iterator[Run]:
    """Open a run whose workers are in this process, one rank each, and whose calls go through `observer`.

    `__init__` of reward workers and plugins' workers does not run, so the observer must make up the results of their
    methods. The step is the last of the run. All prompts come from `dataset`, in its order. The state of the global
    random generators is restored at the end. Raises the errors of starting and of the calls.
    """
    algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
    tokenizer = load_tokenizer(config.model)
    loaders = {
        name: PromptLoader(config.data, dataset, tokenizer, seed=0) for name in ("train", *algorithm.data(config))
    }
    by_default = plugins.datasets()[config.data.name].reward
    rewards = resolve(config.reward, by_default, plugins.rewards(), plugins.by_value_modules, config.data.answer_key)
    executor = _ObservedExecutor(config, observer)
    before = random_state()
    try:
        with (
            TemporaryDirectory(prefix="rlcore-rehearsal-") as folder,
            open_run(config, Path(folder), plugins, roles, rewards, loaders=loaders, executor=executor) as run,
        ):
            run.begin_step(config.trainer.total_steps)
            yield run
            run.end_step()
    finally:
        set_random_state(before)


class _ObservedExecutor(InProcessExecutor):
    def __init__(self, config: Config, observer: WorkerObserver) -> None:
        super().__init__(config.cluster)
        self._observer = observer

    def make_workers(self, world_size: int, classes: Mapping[str, ClassWithInitArgs], gpus: float) -> InProcess:
        """See InProcessExecutor."""
        made = {role: each if each.cls is ModelWorker else _unmade(each.cls) for role, each in classes.items()}
        return _ObservedWorkers(self._observer, world_size, made, gpus)


def _unmade(worker: type[Worker]) -> ClassWithInitArgs:
    """Return the class with its registered methods, without its `__init__` and `shutdown`."""
    return ClassWithInitArgs(type(worker.__name__, (worker,), {"__init__": _nothing, "shutdown": _nothing}))


def _nothing(worker: Worker) -> None:
    pass


class _ObservedWorkers(InProcess):
    def __init__(self, observer: WorkerObserver, *args: Any) -> None:
        super().__init__(*args)
        self._observer = observer

    def submit(
        self, role: str, method: str, calls: Sequence[Any], declared: Sequence[DeclaredResult | None] | None = None
    ) -> FinishedCall:
        """See Processes."""
        ((args, kwargs),) = calls
        call = WorkerCall(
            role,
            method,
            (*args, *kwargs.values()),
            None if declared is None else declared[0],
            lambda: super(_ObservedWorkers, self).submit(role, method, calls, declared).wait()[0],
        )
        try:
            result, mark = self._observer.observe(call)
        except RLCoreError as error:
            return FinishedCall([], error)
        if result is None or mark is None:
            return FinishedCall([result], None)
        if isinstance(result, DataProto):
            return FinishedCall([_marked(result, mark, self._observer)], None)
        return _MarkedResult(result, mark, self._observer)


class _MarkedResult(FinishedCall):
    def __init__(self, result: Any, mark: Hashable, observer: WorkerObserver) -> None:
        super().__init__([result], None)
        self._mark, self._observer = mark, observer

    def wait(self) -> list[Any]:
        self._observer.read(self._mark)
        return super().wait()


class _MarkedBlock(Block):
    def __init__(self, column: Column, mark: Hashable, observer: WorkerObserver) -> None:
        self._column, self.mark, self._observer = column, mark, observer

    def column(self) -> Column:
        self._observer.read(self.mark)
        return self._column


def _marked(batch: DataProto, mark: Hashable, observer: WorkerObserver) -> DataProto:
    marked = batch[:]
    for name, column in batch.table.columns.items():
        here = column.fetch() if isinstance(column, RemoteColumn) else column
        marked.table.bind(name, RemoteColumn.of_block(here.spec(), _MarkedBlock(here, mark, observer), len(here)))
    return marked


def marks_of(batch: DataProto) -> set[Hashable]:
    """Return the marks of all columns of a batch, in a rehearsal."""
    remote = [column for column in batch.table.columns.values() if isinstance(column, RemoteColumn)]
    return {block.mark for column in remote for block in column.blocks if isinstance(block, _MarkedBlock)}
