"""The episodes of an environment that the checks share: who plays them, and how two of them are compared."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcore import Config, DataProto, EnvironmentSpec, PluginManager, Ragged
from rlcore.config import compose
from rlcore.data.loader import held_out_prompts
from rlcore.engine import Finished, Request, RolloutEngine, RolloutSetup, Sampling, model_path
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.from_config import episode_setup
from rlcore.episodes.processes import EnvironmentPool
from rlcore.episodes.rendering import TurnRenderer
from rlcore.episodes.setup import EpisodeSetup
from rlcore_plugin_testing.environment.engines import OpeningEngine, ScriptedEngine, WatchedEngine
from rlcore_plugin_testing.environment.script import Script, ScriptWriter
from rlcore_plugin_testing.report import PLAIN, CheckFailed, CheckSuite

PROMPTS, SAMPLES = 4, 2
"""Prompts of a batch, and episodes of each."""
AT_A_TIME = 4
"""Episodes at a time (`env.concurrency`); fewer than a batch has, so that processes play several."""
SAMPLED_TURN, SAMPLED_TURNS = 16, 3
"""Most tokens of a turn and turns of an episode that the model plays."""
TEMPERATURE = 8.0
"""The model's temperature: the shipped one knows arithmetic only, and would end other prompts' turns at once."""
SCRIPTED, SAMPLED = "scripted", "sampled"
"""The two policies: a script; and the run's model with its rollout engine, after a scripted turn if there are tools."""
TOLERANCE = 1e-3
"""Largest difference of a log-prob, in nats, from the plain model and from the same row in other company, in fp32."""
SUITE = ("data.prompt_len=1024", "rollout.response_len=1500", f"env.concurrency={AT_A_TIME}", "env.retries=1")
"""Overrides of the suite's episodes, which its settings may replace; retries are set by each check."""

Call = tuple[str, tuple[Any, ...]]
"""A call of an episode's environment: reset, turn or finish, with its arguments."""
Answer = dict[str, Any] | EnvironmentFailure
"""The answer to a call."""


@dataclass
class Record:
    """The calls of one episode's environment, and the answer to its reset: the seat of the first turn, the prompt."""

    calls: list[Call]
    opening: tuple[int, Any] = (0, None)


class RecordingPool(EnvironmentPool):
    """Environment processes, with a record of each episode; a retry begins a new record."""

    records: dict[str, Record]

    def reset(self, episode: str, row: Mapping[str, Any], seed: int) -> None:
        """See EnvironmentPool."""
        self.records[episode] = Record([("reset", (dict(row), seed))])
        super().reset(episode, row, seed)

    def turn(self, episode: str, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> None:
        """See EnvironmentPool."""
        self.records[episode].calls.append(("turn", (dict(message), [dict(call) for call in calls])))
        super().turn(episode, message, calls)

    def finish(self, episode: str, cut: Mapping[str, Any] | None = None) -> None:
        """See EnvironmentPool."""
        self.records[episode].calls.append(("finish", () if cut is None else (dict(cut),)))
        super().finish(episode, cut)

    def poll(self, wait: float) -> list[tuple[str, Answer]]:
        """See EnvironmentPool."""
        answers = super().poll(wait)
        for episode, answer in answers:
            if isinstance(answer, dict) and "prompt" in answer:
                self.records[episode].opening = answer["seat"], answer["prompt"]
        return answers


@dataclass(frozen=True)
class RecordingSetup(EpisodeSetup):
    """A setup whose pools record episodes in `records`, by row of the batch."""

    records: dict[str, Record] = field(default_factory=dict)

    def pool(self, processes: int) -> EnvironmentPool:
        """See EpisodeSetup."""
        assert self.environment is not None
        env = self.env
        pool = RecordingPool(
            self.environment,
            processes=processes,
            timeout=env.timeout,
            memory_mb=env.memory_mb,
            keep_env=tuple(env.keep_env),
        )
        pool.records = self.records
        return pool


@dataclass(frozen=True)
class Played:
    """A batch that was played.

    `rows`: by (name of the episode, branch), each a dict of its columns as plain values. `out`: the same as the source
    returned them. `turns`: the engine's requests and rows. `records`: of the environments, by row of the batch.
    """

    batch: DataProto
    out: DataProto
    rows: dict[tuple[str, int], dict[str, Any]]
    turns: list[tuple[Request, Finished]]
    records: dict[str, Record]


class EnvironmentSuite(CheckSuite):
    """One environment, its episodes by two policies, and the rows of a first undisturbed batch of each.

    `script`: the turns of the scripted policy (see Script); `rows`: the data rows of the episodes, in place of those of
    the settings' data set.
    """

    noun = "environment"
    group = "env"

    def __init__(
        self,
        name: str,
        folder: Path,
        checks: Mapping[str, Callable[[Any], str]],
        *,
        script: Script | None = None,
        rows: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> None:
        super().__init__(name, folder, checks, **options)
        self.spec = self.manager.specs(EnvironmentSpec)[name]
        self._script = script
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        if rows:
            (folder / "data").mkdir(exist_ok=True)
            for split in ("train", "test"):
                (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))

    @classmethod
    def names(cls, plugins: PluginManager) -> Sequence[str]:
        """See CheckSuite."""
        return list(plugins.specs(EnvironmentSpec))

    @property
    def overrides(self) -> list[str]:
        """The overrides of the suite's config."""
        data = self.folder / "data"
        own = ["data.name=file", f"data.path={data}"] if data.is_dir() else []
        return [f"env.name={self.name}", *PLAIN, *SUITE, *own, *self.settings]

    @property
    def config(self) -> Config:
        """The config with this environment."""
        return self.once("config", lambda: compose(self.overrides, self.manager))

    @property
    def setup(self) -> EpisodeSetup:
        """The setup of the environment's episodes."""

        def make() -> EpisodeSetup:
            setup = episode_setup(self.config, self.manager)
            assert setup is not None
            return setup

        return self.once("setup", make)

    @property
    def renderer(self) -> TurnRenderer:
        """The renderer of turns."""
        return self.once("renderer", lambda: self.setup.renderer())

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.renderer.tokenizer

    @property
    def writer(self) -> ScriptWriter:
        """The writer of the scripted policy's turns."""
        return self.once("writer", lambda: ScriptWriter(self.setup, self._script))

    @property
    def batch(self) -> DataProto:
        """The prompts, each several times."""

        def make() -> DataProto:
            config = self.config
            prompts = held_out_prompts(
                config.data,
                self.manager.datasets()[config.data.name].bound(config),
                self.tokenizer,
                PROMPTS,
                self.setup.offered,
            )
            batch = prompts.repeat(SAMPLES)
            batch["sample_index"] = torch.arange(SAMPLES).repeat(len(prompts))
            return batch

        return self.once("batch", make)

    @property
    def sampling(self) -> Sampling:
        """How turns are sampled."""
        return Sampling(max_tokens=self.config.rollout.response_len, temperature=TEMPERATURE, seed=3, step=1)

    # Policies

    @property
    def hf(self) -> nn.Module:
        """The plain Hugging Face model, whose weights the rollout engine has."""

        def make() -> nn.Module:
            from transformers import AutoModelForCausalLM

            folder = model_path(self.config.model.path)
            model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            return model

        return self.once("hf", make)

    @property
    def model_engine(self) -> RolloutEngine:
        """The run's rollout engine, with the weights of its model folder."""

        def make() -> RolloutEngine:
            config = self.config
            spec = self.manager.rollout_engines()[config.rollout.name]
            section = config.sections.get(f"rollout.{config.rollout.name}")
            engine = spec.create(RolloutSetup(config.model, config.rollout, section, torch.device("cpu")))
            self._stack.callback(engine.close)
            weights = {name: each.detach() for name, each in self.hf.named_parameters()}
            engine.sync(iter(weights.items()), 0, {name: tuple(each.shape) for name, each in weights.items()})
            return engine

        return self.once("model engine", make)

    def scripted_engine(self, batch: DataProto) -> ScriptedEngine:
        """Return an engine that answers the requests of a batch's episodes by the script."""
        rows = data_rows(batch)
        prompts = [tuple(tokens.tolist()) for tokens in batch["prompts"].to_list()]
        by_name = sorted(range(len(rows)), key=lambda row: (rows[row]["uid"], rows[row]["sample_index"]))

        def row_of(request: Request) -> int:
            """Return the row of a request: by its id, or, for requests of agents, the first with its prompt."""
            number = request.id.partition(".")[0]
            if number.isdigit() and int(number) < len(rows):
                return int(number)
            same = [row for row in by_name if request.prompt[: len(prompts[row])] == prompts[row]]
            return (same or by_name)[0]

        def text(request: Request, turn: int) -> str:
            return self.writer.text(rows[row_of(request)], turn)

        return ScriptedEngine(self.tokenizer, min(self.renderer.end_ids), text)

    def _engine(self, policy: str, batch: DataProto) -> RolloutEngine:
        scripted = self.scripted_engine(batch)
        if policy == SCRIPTED:
            return scripted
        return OpeningEngine(scripted, self.model_engine, 1 if self.setup.tools else 0, SAMPLED_TURN)

    # Episodes

    @contextmanager
    def source(self, policy: str = SCRIPTED, **keys: Any) -> Iterator[Callable[..., Played]]:
        """Give a function that plays a batch with one source of episodes: `play(batch, interrupt)`.

        `keys` are of `env`. The environments' temporary files go to `temporary`. Raises CheckFailed when the engine is
        not left idle, and, if no batch has an `interrupt`, when an environment's `close` fails.
        """
        env = self.setup.env
        if policy == SAMPLED:
            keys = {"max_turns": min(env.max_turns, SAMPLED_TURNS), **keys}
        setup = RecordingSetup(**{**vars(self.setup), "env": replace(env, **keys)})
        with self._scratch(), _warnings() as warned:
            engine = WatchedEngine(self._engine(policy, self.batch))
            source = setup.open(engine)
            disturbed = False

            def play(batch: DataProto | None = None, interrupt: Callable[[int], None] | None = None) -> Played:
                nonlocal disturbed
                disturbed = disturbed or interrupt is not None
                rows = self.batch if batch is None else batch
                engine.begin(self._engine(policy, rows), interrupt)
                asked = rows.select()
                asked["episode_row"] = torch.arange(len(rows))
                try:
                    out = source.play(asked, self.sampling)
                finally:
                    _expect_idle(engine)
                return Played(asked, out, rows_of(asked, out), engine.turns, dict(setup.records))

            try:
                yield play
            finally:
                source.close()
        if warned and not disturbed:
            raise CheckFailed(f"the end of an episode: {warned[0]}")

    def play(self, policy: str = SCRIPTED, batch: DataProto | None = None, **keys: Any) -> Played:
        """Play a batch in processes of its own."""
        with self.source(policy, **keys) as play:
            return play(batch)

    def plain(self, policy: str = SCRIPTED) -> Played:
        """Return the undisturbed batch of a policy. Raises CheckFailed when an episode fails."""

        def make() -> Played:
            played = self.play(policy)
            for (name, _), row in played.rows.items():
                if (error := row["episode_error"]) is not None:
                    raise CheckFailed(f"episode {name} of the {policy} policy failed: {told(error)}")
            return played

        return self.once(f"plain {policy}", make)

    @contextmanager
    def _scratch(self) -> Iterator[None]:
        """Let the environments' processes write temporary files into the suite's folder."""
        before = os.environ.get("TMPDIR")
        tempfile.gettempdir()  # this process keeps its own
        os.environ["TMPDIR"] = str(self.temporary)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def data_rows(batch: DataProto) -> list[dict[str, Any]]:
    """Return the rows of a batch with their data columns, and `sample_index`."""
    columns = {name: list(values) for name, values in batch.non_tensor_batch.items()}
    columns["sample_index"] = batch["sample_index"].tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def rows_of(batch: DataProto, out: DataProto) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of episodes by (name of the episode, branch), as plain values."""
    columns: dict[str, list[Any]] = {}
    for name in out.keys():  # noqa: SIM118 (a batch is not a dict)
        values = out[name]
        columns[name] = [each.tolist() for each in values.to_list()] if isinstance(values, Ragged) else values.tolist()
    names = [f"{uid}/{index}" for uid, index in zip(batch["uid"], batch["sample_index"].tolist(), strict=True)]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {(names[row.pop("episode_row")], row["branch"]): row for row in rows}


def expect_same(got: Played, want: Played, what: str, tolerance: float = 0.0) -> None:
    """Raise CheckFailed unless two plays have the same rows, with log-probs within the tolerance."""
    if missing := sorted(set(got.rows) ^ set(want.rows)):
        raise CheckFailed(f"{what}: episode {missing[0][0]} has other branches")
    for key, row in want.rows.items():
        other = got.rows[key]
        if (error := other["episode_error"]) is not None and row["episode_error"] is None:
            raise CheckFailed(f"{what}: episode {key[0]} failed: {told(error)}")
        # Messages first: they show most.
        for column in sorted(row, key=lambda name: name != "episode_messages"):
            one, two = row[column], other[column]
            same = one == two
            if column == "rollout_log_probs" and not same and len(one) == len(two):
                same = all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(one, two, strict=True))
            if not same:
                raise CheckFailed(f"{what}: episode {key[0]} has another {column}: {_difference(one, two)}")


def told(error: Mapping[str, Any]) -> str:
    """Return the cause of a failed episode, with the last line of its traceback's code."""
    trace = [line.strip() for line in str(error.get("traceback", "")).splitlines() if line.strip().startswith("File")]
    return f"{error['cause']}{f' ({trace[-1]})' if trace else ''}"


def _difference(one: Any, two: Any) -> str:
    """Show the first place in which two values differ."""
    if isinstance(one, list) and isinstance(two, list):
        for at, (a, b) in enumerate(zip(one, two, strict=False)):
            if a != b:
                return f"number {at} is {_shown(b)}, and was {_shown(a)}"
        return f"it has {len(two)} entries, and had {len(one)}"
    return f"it is {_shown(two)}, and was {_shown(one)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 150 else f"{text[:150]} ..."


def _expect_idle(engine: WatchedEngine) -> None:
    if engine.in_flight:
        raise CheckFailed(f"{len(engine.in_flight)} requests are still in the engine at the end of a batch")
    if engine.kept:
        raise CheckFailed(f"the engine was not told to forget {len(engine.kept)} rows at the end of a batch")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings that rlcore logs about environments' processes."""
    found: list[str] = []
    log = logging.getLogger("rlcore.episodes.processes")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
