"""Records the dataflow of an algorithm: its step runs once, in this process, on the shipped tiny model.

The planner knows only the calls of an algorithm's roles. A column carries the mark of the call that made it, through
every batch; a call depends on the calls that made its input columns. A read on the controller delays all later calls,
as in a real run.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rlcore import Config, ConfigError, DataProto, DatasetSpec, Ragged, Role
from rlcore.planning import REWARD_WORKERS, WorkerCall, WorkerObserver, marks_of, rehearse, run_roles
from rlcore_plugin_plan.dataflow import GENERATION, UPDATE, WEIGHTS, WORK, Call, Dataflow

if TYPE_CHECKING:
    from rlcore import PluginManager

PROMPTS = 4
TOKENS = 4
"""Prompts of the recorded step, and the longest response in tokens."""
SAMPLING = ("temperature", "top_p", "top_k")
"""A role's own rollout keys that the recorded step keeps: whether the rollout serves log-probs follows from them."""


def record(config: Config, plugins: PluginManager, roles: Mapping[str, Role] | None = None) -> Dataflow:
    """Return the dataflow of a step of `config.algorithm`, the last of the run.

    roles: the run's, as `run_roles` returns them, which checks the config (default: they are asked for here).
    Prompts, scores and the results of plugins' workers are made up, all different; only the algorithm itself runs.
    Raises ConfigError, with the step's error, when the step cannot run this way.
    """
    roles = run_roles(config, plugins) if roles is None else roles
    # The tiny model has no head of a critic or reward model; a role that trains or follows gets a new one.
    tiny = {}
    for name, role in roles.items():
        sampling = {key: value for key, value in role.rollout.items() if key in SAMPLING}
        tiny[name] = replace(role, model=None, trains=role.follows is None, rollout=sampling)
    tape = Tape(tiny, passing=config.reward.pass_score)
    algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
    try:
        with rehearse(_small(config, plugins), plugins, tiny, _MADE_UP, tape) as run, tape.recording():
            algorithm.step(run, run.next_prompts())
    except Exception as error:  # a plugin may raise any error
        raise ConfigError(
            f"the step of algo={config.algorithm} cannot be recorded on made-up prompts, so it cannot be planned: "
            f"{type(error).__name__}: {error}"
        ) from error
    follows = {name: role.follows for name, role in roles.items() if role.follows is not None}
    return Dataflow(tuple(tape.calls), follows)


def _small(config: Config, plugins: PluginManager) -> Config:
    """Return the config with which the step is recorded: a tiny model, and batches that take a moment.

    A rollout engine that samples with the trained module stands in for the config's engine, which may need a GPU.
    """
    engines = plugins.rollout_engines()
    stand_in = next(spec for spec in engines.values() if spec.capabilities.shares_module)
    own = {} if stand_in.config_class is None else {f"rollout.{stand_in.name}": stand_in.config_class()}
    settings = plugins.train_engines()[config.engine.name].capabilities.settings
    small = {
        **{"model.path": "tiny", "model.attention": "auto"},
        **{"model.chat_template": None, "model.chat_template_kwargs": {}},
        **{"data.batch_size": PROMPTS, "data.prompt_len": 512, "data.path": None, "data.system_prompt": None},
        **{"data.shuffle": False, "reward.workers": 1, "trainer.rollouts_ahead": 0},
        **{"rollout.name": stand_in.name, "rollout.response_len": TOKENS, "rollout.tp": 1},
        "rollout.min_tokens": min(TOKENS, config.rollout.min_tokens),
        **{"engine.pp": 1, "engine.tp": 1, "engine.offload": False, "engine.layouts": {}},
        **({settings["shard"]: 0} if "shard" in settings else {}),
        **{"cluster.executor": "in_process", "cluster.address": None, "cluster.workers": 1, "cluster.pools": {}},
        **{"cluster.cpus_per_worker": 1, "cluster.gpus_per_worker": 0.0, "cluster.colocate": "fused"},
    }
    changed = config.with_values(small)
    return replace(changed, sections={**changed.sections, **own})


class Tape(WorkerObserver):
    """Records the calls of a step, and the controller's reads of their results."""

    def __init__(self, roles: Mapping[str, Any], passing: float) -> None:
        """`roles` are those with models; `passing` is the score from which a sample counts as correct."""
        self.calls: list[Call] = []
        self._roles, self._passing = roles, passing
        self._waited: set[int] = set()
        self._on = False
        self._inside = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls and reads inside this context."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    @contextmanager
    def _inside_worker(self) -> Iterator[None]:
        """Mark reads as a worker's: they delay no later call."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def observe(self, call: WorkerCall) -> tuple[Any, int | None]:
        """See WorkerObserver: the mark of a result is the number of its call."""
        number = self._begin(call) if self._on else None
        with self._inside_worker():
            # rlcore's own methods (reads and maps of rows) run for real in every worker.
            runs = call.worker in self._roles or call.method.startswith("_")
            result = call.run() if runs else self._made_up(call)
            if number is not None and _hands_back(result, call.arguments):
                self.calls[number] = replace(self.calls[number], works=False, served=True)
        return result, number

    def read(self, mark: Any) -> None:
        """See WorkerObserver."""
        if self._on and not self._inside:
            self._waited.add(mark)

    def _begin(self, call: WorkerCall) -> int | None:
        """Record a call and return its number; None for a read of the data plane."""
        if call.method.startswith("_read"):
            return None
        batches = list(_batches(call.arguments))
        needs: set[Any] = self._waited.union(*map(marks_of, batches))
        if call.method in WEIGHTS:
            # It has no columns; it depends on all earlier calls, as they used or made the weights.
            needs = set(range(len(self.calls)))
        rows = sum(len(batch) for batch in batches)
        with self._inside_worker():
            prompts = len(set().union(*map(_prompts, batches)))
        works = call.method in WORK and call.worker in self._roles
        made = Call(
            call.worker, call.method, rows / PROMPTS, prompts / PROMPTS, needs=tuple(sorted(needs)), works=works
        )
        if call.method in GENERATION:
            sampling = call.arguments[1]
            made = replace(made, share=sampling.max_tokens / TOKENS)
        elif call.method in UPDATE:
            items, epochs, _ = call.arguments
            together = all(item.keep_together is not None for item in items)
            made = replace(made, epochs=epochs, mini_batches=max(1, len(items[0].sizes)), together=together)
        self.calls.append(made)
        return len(self.calls) - 1

    def _made_up(self, call: WorkerCall) -> DataProto | None:
        """Return a made-up result: reward functions and plugins' workers do not run."""
        if not self._on:
            return None
        if call.declared is None:
            raise ConfigError(
                f"{call.worker}.{call.method}() does not declare its columns, so its result cannot be made up: add "
                "gives=... to its @register"
            )
        columns = {name: _made_up_column(spec, call.declared.rows) for name, spec in call.declared.columns.items()}
        if call.worker == REWARD_WORKERS:
            scores = self._scores(call.arguments[0])
            columns |= {name: scores for name in columns if name.startswith("score")}
        return DataProto.from_single_dict(columns)

    def _scores(self, batch: DataProto) -> torch.Tensor:
        """Return a different score for each row; all rows pass, so that a step learns from all of them."""
        uid = batch.view("uid").tolist() if "uid" in batch else range(len(batch))
        index = batch.view("sample_index").tolist() if "sample_index" in batch else [0] * len(batch)
        keys = [f"{name} {number} {row}" for row, (name, number) in enumerate(zip(uid, index, strict=True))]
        return torch.tensor([self._passing + zlib.crc32(key.encode()) / 2**32 for key in keys])


def _made_up_column(spec: Any, rows: int) -> Any:
    """Return a column of this ColumnSpec: 0 and 1 in turn as floats, else zeros, False or None."""
    if spec.kind == "object":
        return [None] * rows
    if spec.kind == "ragged":
        return Ragged.from_list([torch.zeros(0, *spec.shape, dtype=spec.dtype) for _ in range(rows)], dtype=spec.dtype)
    values = torch.zeros(rows, *spec.shape, dtype=spec.dtype)
    if spec.dtype.is_floating_point:
        values[1::2] = 1
    return values


def _rows(config: Any, split: str) -> list[dict[str, Any]]:
    first = 0 if split == "train" else 50
    keys = ("prompt", "answer", "completion", "chosen", "rejected", config.prompt_key, config.answer_key)
    rows = []
    for number in range(first, first + 4 * PROMPTS):
        texts = {key: f"{number} {key[:3]}" for key in keys}
        rows.append({"label": number % 2 == 0, **texts, config.prompt_key: f"{number}+1="})
    return rows


_MADE_UP: DatasetSpec[Any] = DatasetSpec("plan", _rows, reward="")


def _batches(value: Any) -> Iterator[DataProto]:
    """Give the batches in a call's arguments, also inside lists, mappings and dataclasses."""
    if isinstance(value, DataProto):
        yield value
    elif isinstance(value, Mapping):
        yield from _batches(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _batches(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _batches([getattr(value, field.name) for field in fields(value)])


def _prompts(batch: DataProto) -> set[tuple[int, ...]]:
    """Return the different prompts of a batch, as token ids."""
    return {tuple(row.tolist()) for row in batch.view("prompts")} if "prompts" in batch else set()


def _hands_back(result: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a call returned only numbers from its input."""
    return isinstance(result, DataProto) and any(_is_part_of(result, batch) for batch in _batches(arguments))


def _is_part_of(result: DataProto, batch: DataProto) -> bool:
    """Return whether the columns of a result are all equal to float columns of a batch."""
    if not len(result) or not result.keys():
        return False
    sent = [_numbers(batch, name) for name in batch.batch.keys()]  # noqa: SIM118  (a batch iterates over chunks)
    for name in result.keys():  # noqa: SIM118
        found = _numbers(result, name)
        if found is None or not any(each is not None and torch.equal(each, found) for each in sent):
            return False
    return True


def _numbers(batch: DataProto, name: str) -> torch.Tensor | None:
    value = batch.view(name)
    value = getattr(value, "values", value)
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() else None
