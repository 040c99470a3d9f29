"""The handle of a model role: what an algorithm's loop calls on `run.actor`, `run.ref`, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config import Config
from rlcore.engine.parallel.model_shape import engine_of
from rlcore.engine.reward_tokenizer import MESSAGES, TEXTS
from rlcore.engine.rollout import Sampling
from rlcore.engine.train import Importance, UpdateItem
from rlcore.engine.update.microbatch import column_values, update_plan
from rlcore.engine.weights.transfer import Sender
from rlcore.engine.worker import ModelWorker, RoleSetup
from rlcore.errors import DataError
from rlcore.ops import Loss, needs_of
from rlcore.plugins import CRITIC, POLICY, REWARD, Role, RoleKind
from rlcore.protocol import DataProto
from rlcore.protocol.balance import split_batch_by_cost
from rlcore.protocol.glossary import check_fields
from rlcore.roles.metrics import Metrics
from rlcore.roles.placement import ROLLOUT, PoolPlan, sampled_role
from rlcore.roles.rollout_pool import RolloutCopy
from rlcore.roles.row_cost import hidden_size, row_costs
from rlcore.workers import ClassWithInitArgs, Executor, ResourcePool, WorkerGroup
from rlcore.workers.executor import ProcessRequest

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


LENGTHS = ("prompt_length", "response_length")
"""Columns by which rows are spread over the ranks."""


@dataclass
class StepClock:
    """The run's step, from 1 (0 before the first), and how many generate calls it has seen."""

    step: int = 0
    calls: int = 0

    def start(self, step: int) -> None:
        """Begin a step."""
        self.step, self.calls = step, 0


class RoleHandle:
    """A model role. Each method states which columns it reads and gives; the batch may have any others.

    `leader` are the workers of the role that this one follows, where those are in other processes; `rollout` those that
    sample in its place, where generation has processes of its own.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        group: WorkerGroup,
        config: Config,
        clock: StepClock,
        *,
        by_text: bool = False,
        leader: WorkerGroup | None = None,
        rollout: WorkerGroup | None = None,
    ) -> None:
        self.name, self.role, self.group = name, role, group
        self._config, self._clock = config, clock
        self._by_text = by_text
        self._leader = None if leader is None else Sender(leader, torch.float32)
        self._copy: RolloutCopy | None = None
        if rollout is not None:
            forward = torch.bfloat16 if config.model.dtype == "bf16" else torch.float32
            self._copy = RolloutCopy(rollout, Sender(group, forward), config.trainer.rollouts_ahead)

    @property
    def groups(self) -> list[WorkerGroup]:
        """All workers of the role: its own, and those that sample in its place."""
        return [self.group] if self._copy is None else [self.group, self._copy.group]

    def end_step(self, step: int) -> None:
        """Send the weights to where they are sampled from, for a later step. For the trainer; waits for nothing."""
        if self._copy is not None:
            self._copy.end_step(step)

    def sync(self) -> None:
        """Have what follows sample with the newest weights, also with rollouts ahead. For the trainer."""
        if self._copy is not None:
            self._copy.sync()

    def generate(self, prompts: DataProto, **options: Any) -> DataProto:
        """Return `prompts` with one sampled response a row.

        Reads `prompts` and `uid`; rows with the same uid are samples of one prompt and are numbered in `sample_index`
        unless that column is there. Gives the columns of RolloutEngine.generate. `options` replace fields of Sampling
        (`temperature=0.0` is greedy). Raises DataError for a role that does not generate or an unknown option.
        """
        if not self.role.generates:
            raise DataError(f"role {self.name!r} does not generate; declare it with Role(generates=True)")
        check_fields(prompts)
        sampling = self._sampling(options)
        self._clock.calls += 1
        batch = prompts[:]
        if "sample_index" not in batch:
            batch["sample_index"] = _sample_index(batch.view("uid"))
        asked = batch.select(["prompts", "sample_index"], ["uid"], [])
        if self._copy is not None:
            self._copy.before_generate(self._clock.step)
        return batch.union(self.groups[-1].generate(asked, sampling))

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

        `entropy=True` adds the column `entropy`. For old_log_probs the rollout's own may be given where they are the
        same numbers. Both are at the rollout temperature.
        """
        self._check_kind("log_probs", POLICY)
        check_fields(batch)
        columns = ["prompts", "responses"]
        if name == "old_log_probs" and "exact_log_probs" in batch:
            columns += ["rollout_log_probs", "exact_log_probs", "weights_version"]
        sent = batch.select(columns, [], [])
        # Rows that will most likely get the rollout's numbers back cost nothing, and are best left where they are.
        may_be_served = len(columns) > 2 and not entropy and not self._config.trainer.rollouts_ahead
        if self.group.world_size > 1 and may_be_served and bool(batch.view("exact_log_probs").all()):
            return self.group.log_probs(sent, name, entropy)
        return self._spread(self.group.log_probs, batch, sent, name, entropy)

    def values(self, batch: DataProto) -> DataProto:
        """Return the critic's `values`: ragged fp32, the return expected before each response token was chosen.

        Reads `prompts` and `responses`. Raises DataError for a role that is no critic.
        """
        self._check_kind("values", CRITIC)
        check_fields(batch)
        return self._spread(self.group.values, batch, batch.select(["prompts", "responses"], [], []))

    def score(self, batch: DataProto, *, name: str = "scores") -> DataProto:
        """Return the reward model's score of each row as fp32 column `name`.

        Reads `prompts` and `responses`; where the model's tokenizer is another than the actor's, `prompt_text` (or
        `prompt_messages`) and `response_text`. Raises DataError for a role that is no reward model and scores that are
        not finite.
        """
        self._check_kind("score", REWARD)
        check_fields(batch)
        tensors, objects = ([], list(TEXTS)) if self._by_text else (["prompts", "responses"], [])
        if lacking := [column for column in [*tensors, *objects] if column not in batch]:
            raise DataError(
                f"{self.name}.score() reads {', '.join([*tensors, *objects])}; the batch lacks {', '.join(lacking)}"
            )
        named = [column for column in (*([MESSAGES] if self._by_text else []), "uid") if column in batch]
        return self._spread(self.group.score, batch, batch.select(tensors, [*objects, *named], []), name)

    def _costs(self, batch: DataProto, ranks: int) -> list[int] | None:
        """Return what each row costs this role's model; None where that makes no difference or lengths are not there.

        Reads LENGTHS alone, which are small and come here with the reply of the call that made them.
        """
        if ranks == 1 or any(name not in batch for name in LENGTHS):
            return None
        prompts, responses = (batch.view(name) for name in LENGTHS)
        model = self._config.model
        width = hidden_size(replace(model, path=self.role.model or model.path))
        return row_costs((prompts + responses).tolist(), width)

    def _spread(self, method: Callable[..., DataProto], batch: DataProto, sent: DataProto, *args: Any) -> DataProto:
        """Call a method of the group on the columns `sent`, with the rows of `batch` spread over the ranks by cost.

        The result comes in the batch's order.
        """
        ranks = self.group.mesh.size("dp")
        costs = self._costs(batch, ranks)
        if costs is None:
            return method(sent, *args)
        cut, back = split_batch_by_cost(sent, costs, ranks)
        return method(cut, *args)[back]

    def follow(self, share: float = 1.0) -> None:
        """Move this role's weights by `share` of the way to those of the role that it `follows`; 1 copies them.

        Raises DataError for a role that follows none, or a share outside 0 to 1.
        """
        if self.role.follows is None:
            raise DataError(f"role {self.name!r} follows no other; declare it with Role(follows=NAME)")
        if not 0 <= share <= 1:
            raise DataError(f"{self.name}.follow({share}): the share must be from 0 to 1")
        if self._leader is None:
            self.group.follow(share)
        else:
            self.group.take_weights(self._leader.send(), share)

    def _check_kind(self, method: str, kind: RoleKind) -> None:
        if self.role.kind != kind:
            raise DataError(
                f"role {self.name!r} is a {self.role.kind}, which has no {method}(); "
                f"declare it with Role(kind={kind!r})"
            )

    def update(
        self,
        batch: DataProto | Sequence[tuple[DataProto, Loss, float]],
        loss: Loss | None = None,
        *,
        epochs: int = 1,
        mini_batches: int = 1,
        keep_together: str | None = None,
    ) -> Metrics:
        """Train on a batch and return the metrics: one optimizer step for each mini-batch of each epoch.

        It returns at once; reading a metric waits.

        `batch` is one batch with its `loss`, or several `(batch, loss, weight)` that share every optimizer step. The
        losses get its tensor columns, of which `prompts` and `responses` are needed, and `uid` and `keep_together`.
        Rows with equal values in column `keep_together` are in one mini-batch, on one rank and in one micro-batch.
        Mini-batches are consecutive runs of rows; empty ones are skipped and counted. Raises DataError for a frozen
        role and for a loss or gradient that is not finite.
        """
        if not self.role.trains:
            raise DataError(f"role {self.name!r} is frozen; declare it with Role(trains=True) to update it")
        for option, value in (("epochs", epochs), ("mini_batches", mini_batches)):
            if value < 1:
                raise DataError(f"update({option}={value}): there must be at least 1")
        if isinstance(batch, DataProto):
            if loss is None:
                raise DataError("update of one batch needs a loss: update(batch, loss=my_loss)")
            batch = [(batch, loss, 1.0)]
        for _, function, _ in batch:
            self._check_needs(function)
        trainer = self._config.trainer
        kind = trainer.importance if trainer.importance != "auto" else "token" if trainer.rollouts_ahead else "off"
        importance = None
        if kind != "off" and self.role.generates:
            importance = Importance(kind, trainer.importance_cap, trainer.importance_floor)
        ranks = self.group.mesh.size("dp")
        shares: list[list[UpdateItem]] = [[] for _ in range(ranks)]
        for rows, function, weight in batch:
            check_fields(rows)
            named = {"uid", keep_together} & set(rows.non_tensor_batch.keys())
            sent = rows.select(list(rows.batch.keys()), sorted(name for name in named if name), [])
            plan = update_plan(
                len(rows), column_values(rows, keep_together), mini_batches, ranks, self._costs(rows, ranks)
            )
            for share, cuts in zip(shares, plan, strict=True):
                indices = [row for cut in cuts for row in cut]
                sizes = [len(cut) for cut in cuts]
                item = UpdateItem(sent[indices], sizes, function, self._config.algo, weight, keep_together, importance)
                share.append(item)
        if self._copy is not None:
            self._copy.changed()
        future = self.group.update(shares, [epochs] * ranks, [max(0, self._clock.step - 1)] * ranks)
        return Metrics(lambda: future.get()[0])

    def _check_needs(self, loss: Loss) -> None:
        gives = self.role.kind.gives
        if lacking := [need for need in needs_of(loss) if need not in gives]:
            raise DataError(
                f"loss {getattr(loss, '__name__', loss)!r} needs {', '.join(lacking)}, but role {self.name!r} is a "
                f"{self.role.kind}, which gives {', '.join(gives)}; state what it needs with @needs(...)"
            )

    def seconds(self) -> Metrics:
        """Return the seconds of each kind of work since the last call, of the slowest rank; reading them waits."""
        futures = [group.seconds() for group in self.groups]

        def slowest() -> dict[str, float]:
            by_rank = [seconds for future in futures for seconds in future.get()]
            kinds = {kind for seconds in by_rank for kind in seconds}
            return {kind: max(seconds.get(kind, 0.0) for seconds in by_rank) for kind in sorted(kinds)}

        return Metrics(slowest)


def _sample_index(uid: Sequence[Any]) -> torch.Tensor:
    """Return int64 [rows]: how many rows with the same uid came before."""
    seen: Counter[str] = Counter()
    index = []
    for value in uid:
        index.append(seen[value])
        seen[value] += 1
    return torch.tensor(index, dtype=torch.int64)


def start_roles(
    config: Config,
    executor: Executor,
    plugins: PluginManager,
    roles: Mapping[str, Role],
    clock: StepClock,
    pools: Sequence[tuple[PoolPlan, ResourcePool]],
    *,
    by_text: Collection[str] = (),
    extra: Sequence[ProcessRequest] = (),
) -> tuple[dict[str, RoleHandle], list[WorkerGroup]]:
    """Start the workers of all roles on their pools, load their models, and return the handles.

    `by_text` names the reward models that read texts, as their tokenizer is another than the actor's. `extra`: what
    else to start, one worker class each, at the same time; their groups are returned too. Each has a method `start`,
    not blocking, like the workers of the roles, and an error of theirs comes first.
    """
    setups = {
        name: RoleSetup(
            role=role,
            model=replace(config.model, path=role.model or config.model.path),
            engine=replace(engine_of(config.engine, name), lr=config.engine.lr if role.lr is None else role.lr),
            rollout=config.rollout,
            create_train=plugins.train_engines()[config.engine.name].create,
            create_rollout=plugins.rollout_engines()[config.rollout.name].create,
            train_config=config.sections.get(f"engine.{config.engine.name}"),
            rollout_config=config.sections.get(f"rollout.{config.rollout.name}"),
            seed=config.trainer.seed,
            total_steps=config.trainer.total_steps,
            by_text=name in by_text,
        )
        for name, role in roles.items()
    }
    sampled = sampled_role(roles) if any(ROLLOUT in planned.roles for planned, _ in pools) else None
    if sampled is not None:
        setups[ROLLOUT] = replace(setups[sampled], samples_only=True)
        setups[sampled] = replace(setups[sampled], role=replace(roles[sampled], generates=False))
    classes = {name: ClassWithInitArgs(ModelWorker, setup) for name, setup in setups.items()}
    sets = [(pool, names) for planned, pool in pools for names in planned.process_sets]
    requests = [ProcessRequest(pool, {name: classes[name] for name in names}, "-".join(names)) for pool, names in sets]
    started = executor.worker_groups([*extra, *requests])
    others = [group for together in started[: len(extra)] for group in together.values()]
    groups = {name: group for together in started[len(extra) :] for name, group in together.items()}
    mates = {name: names for _, names in sets for name in names}
    for loading in [group.start() for group in [*others, *groups.values()]]:
        loading.get()
    handles = {
        name: RoleHandle(
            name,
            role,
            groups[name],
            config,
            clock,
            by_text=name in by_text,
            leader=groups[role.follows] if role.follows is not None and role.follows not in mates[name] else None,
            rollout=groups[ROLLOUT] if name == sampled else None,
        )
        for name, role in roles.items()
    }
    return handles, others
