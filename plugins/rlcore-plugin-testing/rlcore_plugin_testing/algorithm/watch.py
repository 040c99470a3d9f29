"""Real runs that record their updates, scores and metrics, and in which one thing at a time can be changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rlcore import (
    POLICY,
    AlgorithmSpec,
    CriticHandle,
    DataProto,
    PluginManager,
    PolicyHandle,
    Ragged,
    RewardHandle,
    Role,
    RoleKind,
    Run,
)
from rlcore.ops import Loss, Outputs, Term, needs, needs_of
from rlcore.roles.handles import RoleHandle
from rlcore.roles.metrics import Metrics


@dataclass(frozen=True)
class Item:
    """One batch with its loss that reached a role's `update` in a step; `batch` holds the columns sent to the loss."""

    step: int
    role: str
    kind: RoleKind
    batch: DataProto
    loss: Loss
    weight: float
    keep_together: str | None
    constants: Mapping[str, float]

    @property
    def title(self) -> str:
        """The role and the name of the loss."""
        return f"{function_name(self.loss)} of {self.role}"


@dataclass(frozen=True)
class Mapped:
    """A call of `DataProto.map`: its function, the columns that it reads, and the column of its units."""

    function: Callable[..., Any]
    batch: DataProto
    keep_together: str | None


@dataclass(frozen=True)
class Changes:
    """The changes to a run.

    `random_seed`: seeds the global random generators at the start. `holes`: some response tokens get response_mask 0.
    `raised`: (call, row) of `run.reward` in step 1 whose score becomes the highest. `nan_score`: one score is NaN.
    `failed`: in step 1 the rewards of some rows of each call fail. `forked`: some responses of a call of `generate` are
    episodes with two branches, which are equal. `nan_loss`: every loss is NaN. `frozen`: all
    learning rates are 0. `stop_after`: the run stops after this step.
    """

    random_seed: int | None = None
    holes: bool = False
    raised: tuple[int, int] | None = None
    nan_score: bool = False
    failed: bool = False
    forked: bool = False
    nan_loss: bool = False
    frozen: bool = False
    stop_after: int | None = None


class StopEarly(Exception):
    """Ends a run after its `stop_after` step."""


@dataclass
class RunRecord:
    """The record of a run: each update, each scored batch with its step, each step's metrics.

    `ratios` holds, by loss, the largest distance from 1 of a policy's ratio to old_log_probs. `mapped` holds the calls
    of `map`. `masked` is whether a response got holes. `failed` holds uid and sample_index of rows without a reward.
    `generated` is whether `generate` was called. `asked` holds the roles whose handles were called.
    """

    items: list[Item] = field(default_factory=list)
    scored: list[tuple[int, DataProto]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    masked: bool = False
    failed: set[tuple[str, int]] = field(default_factory=set)
    generated: bool = False
    asked: set[str] = field(default_factory=set)
    roles: Mapping[str, Role] = field(default_factory=dict)


class RecordingPlugins(PluginManager):
    """The plugins of a recorded run. `record_run` sets the changes and the record."""

    changes = Changes()
    record: RunRecord

    def record_run(self, changes: Changes, start: Callable[[Run], None] | None = None) -> RunRecord:
        """Record the next run; `start` is called once its models are loaded. Returns the record, still empty."""
        self.changes, self.record, self._start = changes, RunRecord(), start
        return self.record

    def algorithm(self, name: str) -> AlgorithmSpec:
        """See PluginManager; with learning rates that round to 0 for `frozen`."""
        spec = super().algorithm(name)
        return replace(spec, algorithm=_frozen(spec.algorithm)) if self.changes.frozen else spec

    def run_start(self, run: Run) -> None:
        """Put the recording handles into the run."""
        super().run_start(run)
        changes, record = self.changes, self.record
        record.roles = {name: handle.role for name, handle in run.roles.items()}
        run.roles = {name: RECORDING[handle.kind](handle, run, changes, record) for name, handle in run.roles.items()}
        _record_reward(run, changes, record)
        if changes.holes:
            encode = run.encode
            vars(run)["encode"] = lambda *args: _with_holes(encode(*args), record)
        if self._start is not None:
            self._start(run)
        if changes.random_seed is not None:
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(changes.random_seed)

    def step_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics."""
        super().step_end(run, step, metrics)
        self.record.metrics.append(dict(metrics))
        if step == self.changes.stop_after:
            raise StopEarly


class RecordingHandle(RoleHandle):
    """A role's handle that records each `update`."""

    def __init__(self, handle: RoleHandle, run: Run, changes: Changes, record: RunRecord) -> None:
        vars(self).update(vars(handle))
        self._run, self._changes, self._record = run, changes, record

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
        """See RoleHandle."""
        self._record.asked.add(self.name)
        options: dict[str, Any] = {"epochs": epochs, "mini_batches": mini_batches, "keep_together": keep_together}
        options["constants"] = constants
        if not isinstance(batch, DataProto):
            items = list(batch)
        elif loss is not None:
            items = [(batch, loss, 1.0)]
        else:
            return super().update(batch, **options)  # which raises
        for rows, function, weight in items:
            names = ("uid", "sample_index", keep_together)
            objects = [name for name in names if name is not None and name in rows.non_tensor_batch]
            sent = rows.select(list(rows.batch.keys()), objects, [])
            given = dict(constants or {})
            item = Item(self._run.step, self.name, self.role.kind, sent, function, weight, keep_together, given)
            self._record.items.append(item)
        return super().update([(rows, self._changed(function), weight) for rows, function, weight in items], **options)

    def follow(self, tau: float = 1.0) -> None:
        """See RoleHandle."""
        self._record.asked.add(self.name)
        super().follow(tau)

    def _changed(self, loss: Loss) -> Loss:
        if self._changes.frozen and self.role.kind == POLICY:
            return _recording_ratios(loss, self._record.ratios)
        return _with_nan(loss) if self._changes.nan_loss else loss


class RecordingPolicy(RecordingHandle, PolicyHandle):
    """A policy's handle that records its updates, and can put holes into responses."""

    def generate(self, prompts: DataProto, **options: Any) -> DataProto:
        """See PolicyHandle."""
        self._record.asked.add(self.name)
        self._record.generated = True
        batch = super().generate(prompts, **options)
        if self._changes.forked:
            batch = with_branches(batch)
        return _with_holes(batch, self._record) if self._changes.holes else batch

    def log_probs(self, batch: DataProto, *, name: str = "log_probs", entropy: bool = False) -> DataProto:
        """See PolicyHandle."""
        self._record.asked.add(self.name)
        return super().log_probs(batch, name=name, entropy=entropy)


class RecordingCritic(RecordingHandle, CriticHandle):
    """A critic's handle that records its updates."""

    def values(self, batch: DataProto) -> DataProto:
        """See CriticHandle."""
        self._record.asked.add(self.name)
        return super().values(batch)


class RecordingReward(RecordingHandle, RewardHandle):
    """A reward model's handle that records its updates."""

    def score(self, batch: DataProto, *, name: str = "scores", keep_failed: bool = False) -> DataProto:
        """See RewardHandle."""
        self._record.asked.add(self.name)
        return super().score(batch, name=name, keep_failed=keep_failed)


RECORDING = {cls.kind: cls for cls in (RecordingPolicy, RecordingCritic, RecordingReward)}


def _record_reward(run: Run, changes: Changes, record: RunRecord) -> None:
    """Record the results of `run.reward`; change a score of it, or of its functions, as `changes` says."""
    reward, by_functions = run.reward, run.score_by_functions

    def recording(batch: DataProto, **options: Any) -> DataProto:
        scored = reward(batch, **options)
        if changes.raised is not None and run.step == 1 and changes.raised[0] == len(record.scored):
            scored = scored[:]
            scores = scored["scores"]
            scores[changes.raised[1]] = scores.max() + 1
            scored["scores"] = scores
        record.scored.append((run.step, batch.union(scored)))
        return scored

    def with_nan(batch: DataProto, **options: Any) -> DataProto:
        scored = by_functions(batch, **options)[:]
        scored["scores"] = torch.cat([torch.tensor([torch.nan]), scored["scores"][1:]])
        return scored

    def with_failures(batch: DataProto, **options: Any) -> DataProto:
        scored = by_functions(batch, **options)[:]
        fails = (torch.arange(len(scored)) % 5 == 1) & (run.step == 1)
        scored["scores"] = scored["scores"].masked_fill(fails, torch.nan)
        failure = {"function": "the suite", "cause": "made it fail", "traceback": ""}
        scored["reward_error"] = fails
        scored["reward_detail"] = [failure if fail else None for fail in fails.tolist()]
        rows = batch[fails]
        record.failed |= set(zip(rows["uid"], rows["sample_index"].tolist(), strict=True))
        return scored

    vars(run)["reward"] = recording
    if changes.nan_score:
        vars(run)["score_by_functions"] = with_nan
    if changes.failed:
        vars(run)["score_by_functions"] = with_failures


def hole_positions(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return bool [rows, width]: the response tokens that a run with `holes` masks, never the first of a response."""
    position = torch.arange(width)
    return (position % 3 == 1) & (position < lengths[:, None])


def with_holes(batch: DataProto) -> DataProto:
    """Return the batch with response_mask 0 at `hole_positions`."""
    lengths = batch.view("responses").lengths
    mask = batch.view("response_mask").to_padded()
    batch = batch[:]
    batch["response_mask"] = Ragged.from_padded(mask * ~hole_positions(lengths, mask.shape[1]), lengths)
    return batch


def with_branches(batch: DataProto) -> DataProto:
    """Return the batch as episodes' rows, of which every third, from the first on, has two branches that are equal."""
    number = torch.arange(len(batch))
    copies = 1 + (number % 3 == 0).long()
    rows = number.repeat_interleave(copies)
    batch = batch[rows]
    batch["branch"] = torch.cat([torch.arange(size) for size in copies.tolist()])
    batch["seat"] = torch.zeros_like(rows)
    batch["episode"] = np.array([f"episode {row}" for row in rows.tolist()], dtype=object)
    return batch


def _with_holes(batch: DataProto, record: RunRecord) -> DataProto:
    record.masked = True
    return with_holes(batch)


ROUNDS_TO_ZERO = 1e-60
"""A learning rate that is 0 in fp32, where a run refuses 0 itself."""


def _frozen(algorithm: type) -> type:
    def roles(self: Any) -> dict[str, Role]:
        declared: dict[str, Role] = algorithm.roles(self)  # type: ignore[attr-defined]
        return {name: replace(role, lr=ROUNDS_TO_ZERO) for name, role in declared.items()}

    return type(algorithm.__name__, (algorithm,), {"roles": roles})


def _recording_ratios(loss: Loss, ratios: dict[str, float]) -> Loss:
    def recording(out: Outputs, batch: Mapping[str, Any], config: Any) -> Mapping[str, Term]:
        # The engine also calls the loss only for its counts: without a gradient, with made-up outputs.
        if torch.is_grad_enabled() and "old_log_probs" in batch and "log_probs" in out.given:
            inside = batch["response_mask"] != 0 if "response_mask" in batch else batch["old_log_probs"] != 0
            away = (out.ratio(batch["old_log_probs"]).detach() - 1).abs()[inside]
            name = function_name(loss)
            ratios[name] = max(ratios.get(name, 0.0), float(away.max()) if away.numel() else 0.0)
        return loss(out, batch, config)

    return needs(*needs_of(loss))(recording)


def _with_nan(loss: Loss) -> Loss:
    def broken(out: Outputs, batch: Mapping[str, Any], config: Any) -> Mapping[str, Term]:
        return {name: replace(term, total=term.total * torch.nan) for name, term in loss(out, batch, config).items()}

    return needs(*needs_of(loss))(broken)


@contextmanager
def recorded_maps(mapped: list[Mapped]) -> Iterator[None]:
    """Record every call of `DataProto.map` until the context ends."""
    original = DataProto.map

    def recording(
        self: DataProto, fn: Callable[..., Any], reads: Sequence[str], keep_together: str | None = None
    ) -> DataProto:
        names = {*reads, *([keep_together] if keep_together else [])} & set(self.keys())
        tensors = [name for name in self.batch.keys() if name in names]  # noqa: SIM118 (not a dict)
        objects = [name for name in self.non_tensor_batch.keys() if name in names]  # noqa: SIM118
        mapped.append(Mapped(fn, self.select(tensors, objects), keep_together))
        return original(self, fn, reads, keep_together)

    setattr(DataProto, "map", recording)  # noqa: B010 (a method cannot be assigned)
    try:
        yield
    finally:
        setattr(DataProto, "map", original)  # noqa: B010


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind any number of functools.partial."""
    while hasattr(function, "func"):
        function = function.func
    return function


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name, also through functools.partial."""
    return getattr(plain_function(function), "__qualname__", repr(function))
