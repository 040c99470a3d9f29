"""The handles of model roles, one class a kind: the calls that an algorithm makes on `run.actor`, `run.critic`, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlcore.config import Config, RolloutConfig
from rlcore.engine.reward_tokenizer import MESSAGES, TEXTS
from rlcore.engine.rollout import Episodes, Sampling
from rlcore.engine.update.items import Numerics
from rlcore.errors import DataError, NoRoleError, did_you_mean
from rlcore.model_folder import model_dtype
from rlcore.ops import Loss
from rlcore.plugins import CRITIC, POLICY, REWARD, Role, RoleKind
from rlcore.protocol import DataProto
from rlcore.protocol.balance import split_batch_by_cost
from rlcore.protocol.glossary import check_fields
from rlcore.roles.episode_counts import EpisodeCounts
from rlcore.roles.metrics import Metrics
from rlcore.roles.rollout_pool import RolloutPool
from rlcore.roles.row_cost import batch_costs
from rlcore.roles.updates import check_constants, check_update, importance_of, plan_update
from rlcore.roles.weight_exporter import WeightExporter
from rlcore.workers import WorkerGroup

TOKENS = ("prompts", "responses")
"""The columns that a model reads."""


@dataclass
class StepClock:
    """The run's step, from 1 (0 before the first), and the numbers of generate and update calls in it so far."""

    step: int = 0
    calls: int = 0
    updates: int = 0

    def start(self, step: int) -> None:
        """Begin a step."""
        self.step, self.calls, self.updates = step, 0, 0


class RoleHandle:
    """A model role of any kind; its subclass adds the calls of the kind.

    Each method documents the columns that it reads and gives; the batch may have others. `config` is the run's config
    with this role's settings (`role_config`). `leader`: the workers of the followed role, if they are in other
    processes.
    """

    kind: ClassVar[RoleKind]

    def __init__(
        self,
        name: str,
        role: Role,
        group: WorkerGroup,
        config: Config,
        clock: StepClock,
        *,
        leader: WorkerGroup | None = None,
    ) -> None:
        self.name, self.role, self.group = name, role, group
        self._config, self._clock = config, clock
        self._leader = None if leader is None else WeightExporter(leader, torch.float32)

    if not TYPE_CHECKING:  # otherwise a type checker would allow every method name

        def __getattr__(self, name: str) -> Any:
            """Explain why this kind of role has no such method. Raises NoRoleError."""
            if name.startswith("_"):
                raise AttributeError(name)
            having = [kind for kind, cls in HANDLES.items() if name in vars(cls)]
            if having:
                remedy = f" Declare it with Role(kind={having[0]!r}), or call another role."
            else:
                remedy = did_you_mean(name, dir(type(self)))
            raise NoRoleError(f"role {self.name!r} is a {self.role.kind}, which has no {name}().{remedy}")

    @property
    def groups(self) -> list[WorkerGroup]:
        """All worker groups of the role."""
        return [self.group]

    def end_step(self, step: int) -> None:
        """Send the weights to the role's rollout pool, if it has one. For the trainer; waits for nothing."""

    def sync(self) -> None:
        """Make the next generate call sample with the newest weights, also with rollouts ahead. For the trainer."""

    def step_metrics(self) -> dict[str, float]:
        """Return the role's own metrics of the calls since the last time. For the trainer."""
        return {}

    def update(
        self,
        batch: DataProto | Sequence[tuple[DataProto, Loss, float]],
        loss: Loss | None = None,
        *,
        epochs: int = 1,
        mini_batches: int = 1,
        keep_together: str | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> Metrics:
        """Train on a batch and return the metrics: one optimizer step for each mini-batch of each epoch.

        It returns at once; reading a metric waits.

        `batch` is one batch with its `loss`, or several `(batch, loss, weight)` that share every optimizer step. The
        losses get its tensor columns (`prompts` and `responses` are required), `uid` and `keep_together`.
        Rows with equal values in column `keep_together` are in one mini-batch, on one rank and in one micro-batch.
        `constants`: numbers that the losses read as `batch[NAME]`; no tensor column may have such a name.
        Mini-batches are consecutive runs of rows; empty ones are skipped and counted. Raises DataError for a frozen
        role, for a loss that needs an output which this kind of role does not give, for a constant that is a column or
        no number, and for a loss or gradient that is not finite.
        """
        if isinstance(batch, DataProto):
            if loss is None:
                raise DataError("update of one batch needs a loss: update(batch, loss=my_loss)")
            batch = [(batch, loss, 1.0)]
        check_update(self.name, self.role, [function for _, function, _ in batch], epochs, mini_batches)
        constants = dict(constants or {})
        check_constants(constants, [rows for rows, _, _ in batch])
        ranks, trainer = self.group.mesh.size("dp"), self._config.trainer
        shares = plan_update(
            batch,
            ranks,
            mini_batches=mini_batches,
            keep_together=keep_together,
            costs=lambda rows: batch_costs(rows, ranks, self._config.model),
            config=self._config.algo,
            importance=importance_of(self.role, trainer),
            numerics=Numerics(trainer.log_ratio_bound, trainer.on_nonfinite),
            constants=constants,
        )
        # Before the call, so that the next `end_step` sends the weights even if this call is still running.
        self._weights_changed()
        # Learning-rate schedules count from 0, the clock from 1.
        self._clock.updates += 1
        future = self.group.update(shares, [epochs] * ranks, [max(0, self._clock.step - 1)] * ranks)
        # Equal on all ranks, as every number was summed over all of them.
        return Metrics(lambda: future.get()[0])

    def _weights_changed(self) -> None:
        """Note that the weights differ from those last sent to other workers."""

    def follow(self, tau: float = 1.0) -> None:
        """Move this role's weights towards those of the role that it `follows`: w + tau (leader - w).

        `tau` 1 copies them, bit for bit. Raises DataError for a role that follows none, or a tau outside 0 to 1.
        """
        if self.role.follows is None:
            raise DataError(f"role {self.name!r} follows no other; declare it with Role(follows=NAME)")
        if not 0 <= tau <= 1:
            raise DataError(f"{self.name}.follow({tau}): tau must be from 0 to 1")
        if self._leader is None:
            self.group.follow(tau)
        else:
            self.group.take_weights(self._leader.send(), tau)

    def seconds(self) -> Metrics:
        """Return the seconds of each kind of work since the last call, of the slowest rank; reading them waits."""
        futures = [group.seconds() for group in self.groups]

        def slowest() -> dict[str, float]:
            found: dict[str, float] = {}
            for seconds in (of_rank for future in futures for of_rank in future.get()):
                for work, value in seconds.items():
                    found[work] = max(found.get(work, 0.0), value)
            return dict(sorted(found.items()))

        return Metrics(slowest)

    def _spread(self, method: Callable[..., DataProto], batch: DataProto, sent: DataProto, *args: Any) -> DataProto:
        """Call a method of the group on the columns `sent`, with the rows of `batch` spread over the ranks by cost.

        The result comes in the batch's order.
        """
        ranks = self.group.mesh.size("dp")
        costs = batch_costs(batch, ranks, self._config.model)
        if costs is None:
            return method(sent, *args)
        cut, back = split_batch_by_cost(sent, costs, ranks)
        return method(cut, *args)[back]


class PolicyHandle(RoleHandle):
    """A causal language model: log-probs, and responses if its role generates.

    `rollout`: the workers that sample for it, if sampling has processes of its own.
    `episodes`: the setup of the run's environment; then every response is an episode.
    """

    kind = POLICY

    def __init__(
        self,
        name: str,
        role: Role,
        group: WorkerGroup,
        config: Config,
        clock: StepClock,
        *,
        leader: WorkerGroup | None = None,
        rollout: WorkerGroup | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        super().__init__(name, role, group, config, clock, leader=leader)
        self._pool: RolloutPool | None = None
        self._episodes = episodes
        self._counts = EpisodeCounts()
        if rollout is not None:
            forward = model_dtype(config.model)
            self._pool = RolloutPool(rollout, WeightExporter(group, forward), config.trainer.rollouts_ahead)

    @property
    def groups(self) -> list[WorkerGroup]:
        """The role's own workers, and those of its rollout pool."""
        return [self.group] if self._pool is None else [self.group, self._pool.group]

    @property
    def rollout_config(self) -> RolloutConfig:
        """The rollout keys as this role has them."""
        return self._config.rollout

    def end_step(self, step: int) -> None:
        """See RoleHandle."""
        if self._pool is not None:
            self._pool.end_step(step)

    def sync(self) -> None:
        """See RoleHandle."""
        if self._pool is not None:
            self._pool.sync()

    def step_metrics(self) -> dict[str, float]:
        """See RoleHandle: of episodes."""
        return self._counts.metrics()

    def generate(self, prompts: DataProto, **options: Any) -> DataProto:
        """Return `prompts` with one sampled response a row; in a run with an environment, the rows of `rollout`.

        Reads `prompts` and `uid`; rows with the same uid are samples of one prompt and are numbered in `sample_index`
        unless that column is there. Gives the columns of RolloutEngine.generate. `options` replace fields of Sampling
        (`temperature=0.0` is greedy). Raises DataError for a role that does not generate or an unknown option.
        """
        if self._episodes is not None:
            return self.rollout(prompts, **options)
        batch = self._numbered(prompts)
        return batch.union(self._call("generate", batch.select(["prompts", "sample_index"], ["uid"], []), options))

    def rollout(self, prompts: DataProto, environment: Episodes | None = None, **options: Any) -> DataProto:
        """Return the rows of one episode for each row of `prompts`, played in the run's environment.

        Each branch of an episode is a row, with the columns of `generate`, those of episodes (docs/glossary.md), and
        the other columns of its prompt's row. Failed episodes are left out, and counted in the step's metrics. Waits
        for the episodes. `environment`: another setup, from `rlcore.episodes.from_config.episode_setup`.

        Raises EpisodesError when more than `env.max_failures` of the episodes failed, and DataError in a run without an
        environment.
        """
        setup = environment or self._episodes
        if setup is None:
            raise DataError(
                f"{self.name}.rollout() needs an environment: choose one with env=NAME, or call {self.name}.generate()"
            )
        batch = self._numbered(prompts)
        sent = batch.select(["prompts", "sample_index"], list(batch.non_tensor_batch.keys()), [])
        sent["episode_row"] = torch.arange(len(batch))
        played = self._call("rollout_episodes", sent, options, setup)
        return self._counts.kept(batch, played, setup.max_failures, self._clock.calls)

    def _numbered(self, prompts: DataProto) -> DataProto:
        """Return a copy with the column `sample_index`."""
        check_fields(prompts)
        batch = prompts[:]
        if "sample_index" not in batch:
            batch["sample_index"] = _sample_index(batch.view("uid"))
        return batch

    def _call(self, method: str, sent: DataProto, options: dict[str, Any], *arguments: Any) -> DataProto:
        """Call a sampling method of the workers with the newest weights."""
        if not self.role.generates:
            raise DataError(f"role {self.name!r} does not generate; declare it with Role(generates=True)")
        sampling = self._sampling(options)
        # Part of the noise keys: a second call in a step samples other responses.
        self._clock.calls += 1
        if self._pool is not None:
            self._pool.prepare(self._clock.step)
        # The last group samples: the rollout pool if there is one, else the role's own workers.
        result: DataProto = getattr(self.groups[-1], method)(sent, sampling, *arguments)
        return result

    def _sampling(self, options: dict[str, Any]) -> Sampling:
        rollout = self._config.rollout
        plain = Sampling(
            max_tokens=rollout.response_len,
            min_tokens=rollout.min_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            seed=self._config.trainer.seed,
            step=self._clock.step,
            call=self._clock.calls,
        )
        try:
            return replace(plain, **options)
        except TypeError as error:
            raise DataError(f"generate: {error}; allowed are the fields of Sampling") from error

    def log_probs(self, batch: DataProto, *, name: str = "log_probs", entropy: bool = False) -> DataProto:
        """Return the log-probs of `responses` after `prompts` as ragged fp32 column `name`, in nats.

        `entropy=True` adds the column `entropy`. For `old_log_probs` the result may be the rollout's own log-probs, if
        they are the same numbers. Both columns are at the role's rollout temperature.
        """
        check_fields(batch)
        columns = list(TOKENS)
        if name == "old_log_probs" and "exact_log_probs" in batch:
            columns += ["rollout_log_probs", "exact_log_probs", "weights_version"]
        sent = batch.select(columns, [], [])
        # Rows whose rollout numbers are returned cost nothing, so balancing them would only move data.
        may_be_served = len(columns) > 2 and not entropy and not self._config.trainer.rollouts_ahead
        if self.group.world_size > 1 and may_be_served and bool(batch.view("exact_log_probs").all()):
            return self.group.log_probs(sent, name, entropy)
        return self._spread(self.group.log_probs, batch, sent, name, entropy)

    def _weights_changed(self) -> None:
        if self._pool is not None:
            self._pool.mark_stale()


class CriticHandle(RoleHandle):
    """A critic: a value for each response token."""

    kind = CRITIC

    def values(self, batch: DataProto) -> DataProto:
        """Return the critic's `values`: ragged fp32, the return expected before each response token was chosen.

        Reads `prompts` and `responses`.
        """
        check_fields(batch)
        return self._spread(self.group.values, batch, batch.select(list(TOKENS), [], []))


class RewardHandle(RoleHandle):
    """A reward model: a score for each row.

    `reads_text`: its tokenizer differs from the actor's, so it reads texts in place of token ids.
    """

    kind = REWARD

    def __init__(
        self,
        name: str,
        role: Role,
        group: WorkerGroup,
        config: Config,
        clock: StepClock,
        *,
        leader: WorkerGroup | None = None,
        reads_text: bool = False,
    ) -> None:
        super().__init__(name, role, group, config, clock, leader=leader)
        self._reads_text = reads_text

    def score(self, batch: DataProto, *, name: str = "scores", keep_failed: bool = False) -> DataProto:
        """Return the reward model's score of each row as fp32 column `name`.

        Reads `prompts` and `responses`; if the model's tokenizer differs from the actor's, `prompt_text` (or
        `prompt_messages`) and `response_text`. Raises DataError for missing columns and for scores that are not finite,
        which are NaN with `keep_failed`.
        """
        check_fields(batch)
        tensors, objects = ([], list(TEXTS)) if self._reads_text else (list(TOKENS), [])
        needed = [*tensors, *objects]
        if missing := [column for column in needed if column not in batch]:
            raise DataError(f"{self.name}.score() reads {', '.join(needed)}; the batch lacks {', '.join(missing)}")
        optional = [MESSAGES, "uid"] if self._reads_text else ["uid"]
        named = [column for column in optional if column in batch]
        return self._spread(self.group.score, batch, batch.select(tensors, [*objects, *named], []), name, keep_failed)


HANDLES: dict[RoleKind, type[RoleHandle]] = {cls.kind: cls for cls in (PolicyHandle, CriticHandle, RewardHandle)}


def _sample_index(uid: Sequence[Any]) -> torch.Tensor:
    """Return int64 [rows]: the number of earlier rows with the same uid."""
    seen: Counter[str] = Counter()
    index = []
    for value in uid:
        index.append(seen[value])
        seen[value] += 1
    return torch.tensor(index, dtype=torch.int64)
