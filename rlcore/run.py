"""Run: all that an algorithm's loop sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.engine.roles import RoleHandle, StepClock, start_roles
from rlcore.errors import ConfigError, DataError, did_you_mean
from rlcore.protocol import DataProto
from rlcore.rewards.compose import WeightedReward
from rlcore.rewards.worker import RewardWorker
from rlcore.workers import ClassWithInitArgs, WorkerGroup, make_executor

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager, Role


class Run:
    """The models of a run as `run.ROLE`, its reward as `run.reward`, its config, folder and step.

    `config`: the whole typed config. `dir`: the run folder. `step`: from 1; 0 before the first.
    """

    def __init__(
        self, config: Config, folder: Path, clock: StepClock, roles: Mapping[str, RoleHandle], rewards: WorkerGroup
    ) -> None:
        self.config, self.dir = config, folder
        self.roles = dict(roles)
        self._clock = clock
        self._rewards = rewards
        self._logged: dict[str, float] = {}
        self._scored: list[tuple[DataProto, DataProto]] = []

    @property
    def step(self) -> int:
        """The step under way, from 1; 0 before the first."""
        return self._clock.step

    def __getattr__(self, name: str) -> RoleHandle:
        roles = self.__dict__.get("roles", {})
        if name not in roles:
            raise AttributeError(
                f"this run has no role {name!r}.{did_you_mean(name, roles)} The algorithm declares {', '.join(roles)}."
            )
        return roles[name]

    def reward(self, batch: DataProto) -> DataProto:
        """Return each row's `scores` (fp32), `reward_error` and `reward_detail`; with several rewards `score/NAME` too.

        Reads `prompt_text`, `response_text`, `answer`; the reward functions also get all other object columns. The
        step's metrics also read what `generate` gives with the responses.
        """
        columns = list(batch.non_tensor_batch.keys())
        index = ["sample_index"] if "sample_index" in batch else []
        scored = self._rewards.score(batch.select(index, columns, []))
        self._scored.append((batch, scored))
        return scored

    def log(self, **metrics: float) -> None:
        """Add numbers to the step's metrics. Raises DataError for what is not a number."""
        for name, value in metrics.items():
            if not isinstance(value, Real):
                raise DataError(f"run.log: {name}={value!r} is a {type(value).__name__}, not a number")
            self._logged[name] = float(value)

    def begin_step(self, step: int) -> None:
        """Move to a step. For the trainer, not for algorithms."""
        self._clock.start(step)

    def end_step(self) -> tuple[dict[str, float], list[DataProto]]:
        """Wait for all calls, and hand over what was logged and every batch that was scored. For the trainer."""
        for role in self.roles.values():
            role.group.drain()
        self._rewards.drain()
        logged, scored = self._logged, self._scored
        self._logged, self._scored = {}, []
        return logged, [batch.union(rewards) for batch, rewards in scored]


@contextmanager
def open_run(
    config: Config,
    folder: Path,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    rewards: list[WeightedReward],
    *,
    log_dir: Path | None = None,
) -> Iterator[Run]:
    """Start the workers of all roles, fused into one process a rank, and those of the rewards; stop them at the end.

    Each worker writes to a file of its own in `log_dir`. Raises ConfigError for a role name that hides a part of Run,
    and the errors of starting.
    """
    _check_names(roles)
    executor = make_executor(
        config.cluster,
        log_dir=log_dir,
        by_value_modules=plugins.by_value_modules,
        distributions={p.distribution: p.version for p in plugins.list() if p.distribution and p.version},
    )
    with executor:
        # Reward workers first: they start in a moment, and say at once if a user's function cannot be loaded.
        pool = executor.resource_pool(config.reward.workers, cpus_per_worker=1, gpus_per_worker=0.0)
        scorers = executor.worker_group(pool, ClassWithInitArgs(RewardWorker, rewards, config.reward), name="reward")
        scorers.start()
        clock = StepClock()
        yield Run(config, folder, clock, start_roles(config, executor, plugins, roles, clock), scorers)


def _check_names(roles: Mapping[str, Role]) -> None:
    taken = set(vars(Run)) | {"config", "dir", "roles"}
    for name in roles:
        if name in taken or not name.isidentifier():
            raise ConfigError(f"a role cannot be called {name!r}: it is no identifier, or a part of Run has that name")
