"""The dataflow of an algorithm, recorded: its step runs once, in this process, on the shipped tiny model.

Nothing is known of the algorithm but what its roles are asked. Every column that a call returns remembers the call, in
whatever batch it ends up; a call waits for those whose columns it is sent. What the step reads on the controller holds
up all calls that it makes afterwards, as it does in a real run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config import Config
from rlcore.config.schema import ClusterConfig
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import PromptLoader
from rlcore.engine.random_state import random_state, set_random_state
from rlcore.errors import ConfigError
from rlcore.plan.dataflow import GENERATION, UPDATE, WEIGHTS, WORK, Call, Dataflow
from rlcore.plugins import DatasetSpec, Role
from rlcore.protocol import DataProto
from rlcore.protocol.columns import Column
from rlcore.protocol.remote import Block, RemoteColumn
from rlcore.rewards.compose import resolve
from rlcore.rewards.judge import Judge
from rlcore.rewards.worker import named_scores
from rlcore.roles.handles import StepClock
from rlcore.roles.placement import plan
from rlcore.roles.settings import resolve_roles
from rlcore.roles.start import start_roles
from rlcore.run import Run
from rlcore.workers import ClassWithInitArgs, Worker, WorkerGroup, register
from rlcore.workers.dispatch import Dispatch
from rlcore.workers.in_process import FinishedCall, InProcess, InProcessExecutor
from rlcore.workers.pool import ResourcePool

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager

PROMPTS = 4
TOKENS = 4
"""Prompts of the recorded step, and the most tokens of a response."""


def record(config: Config, plugins: PluginManager) -> Dataflow:
    """Return the dataflow of a step of `config.algorithm`, the last of the run.

    Runs nothing of the user's but the algorithm: made-up prompts, scores and preferences, all different. Raises
    ConfigError when the step cannot run so, with what it said.
    """
    algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
    roles = resolve_roles(algorithm.roles(), config)
    small = _small(config, plugins)
    before = random_state()
    try:
        with TemporaryDirectory(prefix="rlcore-plan-") as folder, _open(small, Path(folder), plugins, roles) as run:
            run.begin_step(config.trainer.total_steps)
            with run.tape.recording():
                algorithm.step(run, run.next_prompts())
            run.end_step()
    except Exception as error:  # whatever a plugin raises
        raise ConfigError(
            f"the step of algo={config.algorithm} cannot be recorded on made-up prompts, so it cannot be planned: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        set_random_state(before)
    follows = {name: role.follows for name, role in roles.items() if role.follows is not None}
    return Dataflow(tuple(run.tape.calls), follows)


def _small(config: Config, plugins: PluginManager) -> Config:
    """Return the config with which the step is recorded: its own, of a model and batches that take a moment.

    An engine that samples with the trained module itself stands in for the config's, which may need a GPU.
    """
    engines = plugins.rollout_engines()
    stand_in = next(spec for spec in engines.values() if spec.capabilities.shares_module)
    own = {f"rollout.{stand_in.name}": stand_in.config_class()} if stand_in.config_class else {}
    settings = plugins.train_engines()[config.engine.name].capabilities.settings
    small = config.with_values(
        {
            **{"model.path": "tiny", "model.attention": "auto", "model.chat_template": None},
            **{"data.batch_size": PROMPTS, "data.prompt_len": 512, "data.path": None, "data.system_prompt": None},
            **{"rollout.name": stand_in.name, "rollout.response_len": TOKENS, "rollout.tp": 1},
            "rollout.min_tokens": min(TOKENS, config.rollout.min_tokens),
            **{"engine.pp": 1, "engine.tp": 1, "engine.dp": 0, "engine.offload": False, "engine.layouts": {}},
            **({settings["shard"]: 0} if "shard" in settings else {}),
            "trainer.rollouts_ahead": 0,
        }
    )
    return replace(small, cluster=ClusterConfig(executor="in_process", workers=1), sections={**small.sections, **own})


@contextmanager
def _open(config: Config, folder: Path, plugins: PluginManager, roles: Mapping[str, Role]) -> Iterator[_RecordedRun]:
    """Start the roles as a run does, on workers that note their calls."""
    tiny = {name: replace(role, model=None) for name, role in roles.items()}
    tape = Tape()
    with _Recorder(config.cluster, tape) as executor:
        pools = [(planned, planned.open(executor)) for planned in plan(config, tiny)]
        rewards = resolve(
            config.reward, plugins.datasets()[config.data.name].reward, plugins.rewards(), plugins.by_value_modules
        )
        pool = executor.resource_pool(1)
        scorers = executor.worker_group(pool, ClassWithInitArgs(_Scorer, config.reward.pass_score), name="reward")
        clock = StepClock()
        handles, _ = start_roles(config, executor, _WithHeads(plugins), tiny, clock, pools)  # type: ignore[arg-type]
        judge = Judge(config.judge, executor)
        run = _RecordedRun(config, folder, clock, handles, scorers, judge, {}, named_scores(rewards, config.reward))
        run.tape = tape
        yield run


class _WithHeads:
    """The installed engines; a frozen critic or reward model gets a new head, which the tiny model has not."""

    def __init__(self, plugins: PluginManager) -> None:
        self._plugins = plugins

    def train_engines(self) -> dict[str, Any]:
        def with_head(create: Callable[..., Any]) -> Callable[..., Any]:
            return lambda setup: create(replace(setup, new_head=True))

        return {name: replace(e, create=with_head(e.create)) for name, e in self._plugins.train_engines().items()}

    def rollout_engines(self) -> Mapping[str, Any]:
        return self._plugins.rollout_engines()


class Tape:
    """What is recorded: the calls of a step, and those that the controller has waited for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._waited: set[int] = set()
        self._on = False
        self._inside = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note calls and reads while the step runs."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Say that a worker is at work, whose reads hold up nobody else."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def waited(self, number: int) -> None:
        """Note that the result of a call was read."""
        if self._on and not self._inside:
            self._waited.add(number)

    def begin(self, role: str, method: str, arguments: Sequence[Any]) -> int | None:
        """Note a call and return its number; None when nothing is recorded."""
        if not self._on or method.startswith("_read"):
            return None
        batches = list(_batches(arguments))
        needs = {block.call for batch in batches for block in _blocks(batch)} | self._waited
        if method in WEIGHTS:  # it has no columns, but the weights that all before it used or made
            needs = set(range(len(self.calls)))
        rows = sum(len(batch) for batch in batches)
        works = method in WORK and role != "reward"
        with self.inside():  # who looks is no reader
            prompts = len({tuple(row.tolist()) for b in batches if "prompts" in b for row in b.view("prompts")})
        call = Call(role, method, rows / PROMPTS, prompts / PROMPTS, needs=tuple(sorted(needs)), works=works)
        if method in GENERATION:
            sampling = arguments[1]
            call = replace(call, share=sampling.max_tokens / TOKENS)
        elif method in UPDATE:
            items, epochs, _ = arguments
            whole = all(item.keep_together is not None for item in items)
            call = replace(call, epochs=epochs, mini_batches=max(1, len(items[0].sizes)), together=whole)
        self.calls.append(call)
        return len(self.calls) - 1

    def served(self, number: int) -> None:
        """Note that a call handed back what it was sent."""
        self.calls[number] = replace(self.calls[number], works=False, served=True)


class RecordedBlock(Block):
    """Rows that a recorded call has made."""

    def __init__(self, column: Column, call: int, tape: Tape) -> None:
        self._column, self.call, self._tape = column, call, tape

    def column(self) -> Column:
        """See Block."""
        self._tape.waited(self.call)
        return self._column


class _Read(FinishedCall):
    """Results that are no batch: who reads one has waited for the call."""

    note: Callable[[], None]

    def wait(self) -> list[Any]:
        self.note()
        return super().wait()


class _Recording(InProcess):
    """Processes whose calls go onto the tape."""

    def __init__(self, tape: Tape, *args: Any) -> None:
        self._tape = tape
        super().__init__(*args)

    def submit(self, role: str, method: str, calls: Sequence[Any], declared: Any = None) -> FinishedCall:
        args, kwargs = next(call for call in calls if call is not None)
        number = self._tape.begin(role, method, [*args, *kwargs.values()])
        with self._tape.inside():
            finished = super().submit(role, method, calls, declared)
            if number is None or finished._failure is not None:
                return finished
            results = finished.wait()
            if all(result is None or isinstance(result, DataProto) for result in results):
                if any(_is_given_back(result, batch) for result in results for batch in _batches(args)):
                    self._tape.served(number)
                return FinishedCall([_noted(result, number, self._tape) for result in results], None)
        read = _Read(results, None)
        read.note = lambda: self._tape.waited(number)
        return read


class _Recorder(InProcessExecutor):
    def __init__(self, cluster: ClusterConfig, tape: Tape) -> None:
        super().__init__(cluster)
        self._tape = tape

    def worker_group(self, pool: ResourcePool, classes: Any, name: str = "worker") -> Any:
        roles = {name: classes} if isinstance(classes, ClassWithInitArgs) else dict(classes)
        processes = _Recording(self._tape, pool.world_size, roles, pool.gpus_per_worker)
        self._started.append(processes)
        groups = {role: WorkerGroup(processes, role, made.cls) for role, made in roles.items()}
        return groups[name] if isinstance(classes, ClassWithInitArgs) else groups


class _Scorer(Worker):
    """In place of the reward functions: another score for each row, all of which pass, so that a step learns of all."""

    def __init__(self, passing: float) -> None:
        self.passing = passing

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, batch: DataProto, named: Sequence[str] = ()) -> DataProto:
        """See rlcore.rewards.worker.RewardWorker."""
        index = batch.view("sample_index").tolist() if "sample_index" in batch else [0] * len(batch)
        uid = batch.view("uid").tolist() if "uid" in batch else range(len(batch))
        keys = [f"{name} {number} {row}" for row, (name, number) in enumerate(zip(uid, index, strict=True))]
        scores = torch.tensor([self.passing + zlib.crc32(key.encode()) / 2**32 for key in keys])
        result = DataProto({"scores": scores, "reward_error": torch.zeros(len(batch), dtype=torch.bool)})
        result["reward_detail"] = [None] * len(batch)
        for name in named:
            result[f"score/{name}"] = scores
        return result


class _RecordedRun(Run):
    """A run on made-up prompts, and with a judge that is not asked."""

    tape: Tape

    def judge(self, first: DataProto, second: DataProto) -> DataProto:
        """See Run."""
        return DataProto.from_single_dict(
            {
                "preference": (torch.arange(len(first)) % 2).float(),
                "judge_error": torch.zeros(len(first), dtype=torch.bool),
            }
        )

    def next_prompts(self, name: str = "train") -> DataProto:
        """See Run."""
        if name not in self._loaders:
            settings = replace(self.config.data, name="plan", batch_size=PROMPTS, shuffle=False)
            loader = PromptLoader(settings, _MADE_UP, load_tokenizer(self.config.model), seed=0)
            self._loaders = {**self._loaders, name: loader}
        return self._loaders[name].next_batch()


def _rows(config: Any, split: str) -> list[dict[str, str]]:
    first = 0 if split == "train" else 50
    keys = ("prompt", "answer", "completion", "chosen", "rejected", config.prompt_key, config.answer_key)
    texts = [{key: f"{number} {key[:3]}" for key in keys} for number in range(first, first + 4 * PROMPTS)]
    return [{**row, config.prompt_key: f"{number}+1="} for number, row in enumerate(texts, start=first)]


_MADE_UP = DatasetSpec("plan", _rows, reward="")


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


def _blocks(batch: DataProto) -> Iterator[RecordedBlock]:
    for column in batch.table.columns.values():
        if isinstance(column, RemoteColumn):
            yield from (block for block in column.blocks if isinstance(block, RecordedBlock))


def _noted(result: DataProto | None, number: int, tape: Tape) -> DataProto | None:
    """Return the result with columns that remember the call."""
    if result is None:
        return None
    noted = result[:]
    for name, column in result.table.columns.items():
        here = column.here() if isinstance(column, RemoteColumn) else column
        block = RecordedBlock(here, number, tape)
        noted.table.bind(name, RemoteColumn.of_block(here.spec(), block, len(here)))
    return noted


def _is_given_back(result: DataProto | None, batch: DataProto) -> bool:
    """Whether all that a call returned are numbers that it was sent."""
    if result is None or not len(result) or not result.table.columns:
        return False
    sent = [_numbers(batch, name) for name in batch.batch.keys()]  # noqa: SIM118  (a batch iterates over chunks)
    for name in result.table.columns:
        found = _numbers(result, name)
        if found is None or not any(each is not None and torch.equal(each, found) for each in sent):
            return False
    return True


def _numbers(batch: DataProto, name: str) -> torch.Tensor | None:
    value = batch.view(name)
    value = getattr(value, "values", value)
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() else None
