"""What plugins hand over: a frozen dataclass for each kind of thing that can be added, and the class Algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlcore.plugins.roles import Role

if TYPE_CHECKING:
    from rlcore.config import schema
    from rlcore.protocol import DataProto

API_VERSION = 1
"""The plugin contract's version; a plugin module states the one it was written for as `RLCORE_API = 1`."""


class Algorithm:
    """Base class of algorithms: a config, the roles it needs, and the loop of one step.

    It holds no Ray, ranks, devices, padding, weight sync, logging or checkpointing. `config` is the algorithm's own
    frozen dataclass.
    """

    config_class: ClassVar[type]

    def __init__(self, config: Any) -> None:
        self.config = config

    def roles(self) -> Mapping[str, Role]:
        """Return the roles by name; `run.NAME` is the handle of each. Called once, before anything starts."""
        return {"actor": Role(trains=True, generates=True)}

    def data(self, config: schema.Config) -> Mapping[str, schema.DataConfig]:
        """Return further data sets by name, for `run.next_prompts(name)`. Called once, before anything starts."""
        return {}

    def check(self, config: schema.Config) -> None:
        """Raise ConfigError when the config cannot work with this algorithm. Called once, before anything starts."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError when a row of the run's data set lacks what the algorithm reads, such as a column.

        Called for each row, also the held-out ones, before anything starts; the error then names the row.
        """

    def evaluate(self, run: Any, held_out: DataProto) -> Mapping[str, float]:
        """Return metrics of held-out rows by name, `accuracy` among them; for an algorithm with a measure of its own.

        Without this method the role `actor` answers the held-out prompts and the reward functions count what is right.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no evaluate(self, run, held_out)")

    @property
    def evaluates(self) -> bool:
        """Whether the algorithm brings an `evaluate` of its own."""
        return type(self).evaluate is not Algorithm.evaluate

    def step(self, run: Any, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step on a batch of prompts and return its metrics (numbers, or the Metrics of `update`)."""
        raise NotImplementedError(f"{type(self).__name__} defines no step(self, run, prompts)")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beyond the models, as values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm. `name` must equal the entry point's name (a local file's: its stem)."""

    name: str
    algorithm: type[Algorithm]


@dataclass(frozen=True)
class RewardSpec:
    """A reward function.

    `score(prompt: str, response: str, answer: Any, **columns) -> float`, or with `batched=True` the same names as lists
    of equal length and a list of floats back. It runs in a reward worker's own subprocess, which loads the
    modules named by `imports` before the first call: what `score` imports when called belongs there, or its time counts
    as a sample's.
    """

    name: str
    score: Callable[..., Any]
    batched: bool = False
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetSpec:
    """A data set. `load(config, split)` with split "train" or "eval" returns a sequence of dict rows.

    Rows hold at least the prompt column (`config.prompt_key`); `reward` names the reward function that fits.
    """

    name: str
    load: Callable[[schema.DataConfig, str], Any]
    reward: str


@dataclass(frozen=True)
class RolloutEngineSpec:
    """A rollout engine: `create(**kwargs)` returns an `rlcore.engine.rollout.RolloutEngine`."""

    name: str
    create: Callable[..., Any]


@dataclass(frozen=True)
class TrainEngineSpec:
    """A train engine: `create(**kwargs)` returns an `rlcore.engine.train.TrainEngine`."""

    name: str
    create: Callable[..., Any]


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker: `create(config: Config, run_dir: Path)` returns an `rlcore.trackers.Tracker`."""

    name: str
    create: Callable[..., Any]


@dataclass(frozen=True)
class CommandSpec:
    """A command `rlcore NAME ...`: `main(argv) -> int` gets the arguments behind the name, returns the exit status."""

    name: str
    summary: str
    main: Callable[[list[str]], int]
