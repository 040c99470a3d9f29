"""What plugins hand over: a frozen dataclass for each kind of thing that can be added, and the class Algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from rlcore.plugins.roles import POLICY, Role, RoleKind

if TYPE_CHECKING:
    from rlcore.config import schema
    from rlcore.engine.parallel.layout import Layout
    from rlcore.engine.rollout import RolloutEngine, RolloutSetup
    from rlcore.engine.train import TrainEngine, TrainSetup
    from rlcore.protocol import DataProto
    from rlcore.workers import Worker, WorkerGroup

C = TypeVar("C")
Setting = Literal["shard", "recompute", "layerwise_above", "logits_chunk", "padding_free"]

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
class RolloutCapabilities:
    """What a rollout engine can do.

    tensor_shards: several ranks can sample the same rows together, each with its shard of the layers (`rollout.tp`).
    continuous_batching: a waiting row takes the place of a finished one while the others go on decoding.
    adopts_weights: it can generate from tensors that are not its own, so that no copy of the weights is made.
    shares_module: it can generate with the train engine's own torch module.
    slots_key: config key with the number of sequences that a worker decodes at once.
    cache_key: config key with the MiB that a worker takes for keys and values.
    """

    tensor_shards: bool = False
    continuous_batching: bool = False
    adopts_weights: bool = False
    shares_module: bool = False
    slots_key: str | None = None
    cache_key: str | None = None


@dataclass(frozen=True)
class TrainCapabilities:
    """What a train engine can do.

    kinds: the kinds of role that it can hold.
    layouts: it spreads a model over pipeline stages, tensor shards and data-parallel ranks (`engine.pp`, `tp`, `dp`).
    Without it the engine has one worker, which holds the whole model.
    offload: weights and optimizer state can leave the GPU while responses are sampled (`engine.offload`).
    settings: config keys of the engine that decide time and memory of a step, by meaning. `shard`: data-parallel ranks
    that share one copy of the weights. `recompute`: activations are computed again in backward. `layerwise_above`:
    parameters from which on layers are sharded one by one. `logits_chunk`: positions whose logits exist at one time.
    `padding_free`: sequences are packed without padding.
    """

    kinds: tuple[RoleKind, ...] = (POLICY,)
    layouts: bool = False
    offload: bool = False
    settings: Mapping[Setting, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutEngineSpec(Generic[C]):
    """A rollout engine, `rollout=NAME`.

    create: makes the engine, in each worker process that generates.
    config_class: the engine's own config, a frozen dataclass of fields made by `option`; its keys are `rollout.NAME.*`
    and `create` gets it as `setup.config`. None: it has no keys, and `setup.config` is None.
    check: raises ConfigError for a config that the engine cannot run; called once a run, before anything starts.
    """

    name: str
    create: Callable[[RolloutSetup[C]], RolloutEngine]
    config_class: type[C] | None = None
    capabilities: RolloutCapabilities = RolloutCapabilities()
    check: Callable[[schema.Config], None] | None = None


@dataclass(frozen=True)
class TrainEngineSpec(Generic[C]):
    """A train engine, `engine=NAME`.

    create: makes the engine, in each worker process of a role.
    config_class: the engine's own config, a frozen dataclass of fields made by `option`; its keys are `engine.NAME.*`
    and `create` gets it as `setup.config`. None: it has no keys, and `setup.config` is None.
    check: raises ConfigError for a config that the engine cannot run; called once a run, before anything starts.
    check_layout: raises ConfigError where the engine's own config does not fit a role's layout; called for each role.
    """

    name: str
    create: Callable[[TrainSetup[C]], TrainEngine]
    config_class: type[C] | None = None
    capabilities: TrainCapabilities = TrainCapabilities()
    check: Callable[[schema.Config], None] | None = None
    check_layout: Callable[[C, Layout], None] | None = None


@dataclass(frozen=True)
class ConfigSpec(Generic[C]):
    """A section of the config with the keys `NAME.*`; read it with `config.section(config_class)`.

    config_class: a frozen dataclass whose fields are made by `option` and all have defaults.
    check: raises ConfigError for a config that cannot work; called once a run, before anything starts.
    """

    name: str
    config_class: type[C]
    check: Callable[[schema.Config], None] | None = None


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker: `create(config: Config, run_dir: Path)` returns an `rlcore.trackers.Tracker`."""

    name: str
    create: Callable[..., Any]


@dataclass(frozen=True)
class WorkerSpec:
    """Workers of a plugin's own, in processes beside those of the roles: `run.group(NAME)`.

    worker: the class, a subclass of `rlcore.workers.Worker`; args: its arguments, the same for every rank.
    handle: called in the driver as `handle(group, config)`; `run.group` then returns its result in place of the
    WorkerGroup. A handle may have a method `end_step()`, called when a step has made its last call, that returns a
    function: it waits for the step's results and returns metrics by name.
    workers: ranks, each a process; cpus_per_worker and gpus_per_worker: of each.

    The processes start at the first `run.group(NAME)` of a run, and stop with the run.
    """

    name: str
    worker: type[Worker]
    args: tuple[Any, ...] = ()
    handle: Callable[[WorkerGroup, schema.Config], Any] | None = None
    workers: int = 1
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0


@dataclass(frozen=True)
class CommandSpec:
    """A command `rlcore NAME ...`: `main(argv) -> int` gets the arguments behind the name, returns the exit status."""

    name: str
    summary: str
    main: Callable[[list[str]], int]
