"""The specs of plugins: a frozen dataclass for each kind, and PLUGIN_KINDS, the table of the kinds.

A new kind is a dataclass and a row of PLUGIN_KINDS here, and its hook in `rlcore.plugins.hookspecs`. Loading, checking,
config groups, `rlcore plugins` and the reference page follow from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from rlcore.config.environment import EnvConfig
from rlcore.config.eval_sets import set_config, source_config
from rlcore.plugins.algorithm import Algorithm
from rlcore.plugins.entries import algorithm_of, command_of
from rlcore.plugins.roles import POLICY, Role, RoleKind

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rlcore.commands.line import CommandLine
    from rlcore.config import schema
    from rlcore.engine.parallel.layout import Layout
    from rlcore.engine.rollout import EpisodeSource, RolloutEngine, RolloutSetup
    from rlcore.engine.train import TrainEngine, TrainSetup
    from rlcore.episodes.setup import EpisodeSetup
    from rlcore.episodes.tool_calls import ToolFormat
    from rlcore.workers import Worker, WorkerGroup

__all__ = [
    "AlgorithmSpec",
    "CommandSpec",
    "ConfigSpec",
    "DatasetSpec",
    "EnvironmentSpec",
    "RewardSpec",
    "RolloutCapabilities",
    "RolloutEngineSpec",
    "ToolFormatSpec",
    "TrackerSpec",
    "TrainCapabilities",
    "TrainEngineSpec",
    "WorkerSpec",
]
"""What plugins import from `rlcore`."""

C = TypeVar("C")
S = TypeVar("S")
T = TypeVar("T")
Setting = Literal["shard", "recompute", "layerwise_above", "logits_chunk", "padding_free"]

API_VERSION = 1
"""The plugin contract's version; a plugin module states the one it was written for as `RLCORE_API = 1`."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm. `name` must equal the entry point's name (a local file's: its stem)."""

    name: str
    algorithm: type[Algorithm]


@dataclass(frozen=True)
class RewardSpec:
    """A reward function.

    `score(prompt: str, response: str, answer: Any, **columns) -> float`, or with `batched=True` the same names as lists
    of equal length and a list of floats back. It runs in a reward worker's own subprocess. This loads the modules named
    by `imports` before the first call: list the modules that `score` imports when called, or their import counts as a
    sample's time. `on_start()` is called once in the controller at a run's start, for an installed reward; it logs what
    users should know, such as limits that this machine cannot enforce. `needs_answer`: it reads the reference answer,
    so a run refuses rows without one before it starts. `extract(response: str) -> str | None` returns the response's
    final answer as text, equal for responses that answer alike, or None for a response without one: evaluations then
    report maj@k. It runs in the same subprocess and under the same limits, after `score`.
    """

    name: str
    score: Callable[..., Any]
    batched: bool = False
    imports: tuple[str, ...] = ()
    on_start: Callable[[], None] | None = None
    needs_answer: bool = False
    extract: Callable[[str], str | None] | None = None


@dataclass(frozen=True)
class DatasetSpec(Generic[C]):
    """A data set. `load(config, split)` with split "train" or "eval" returns a sequence of dict rows.

    Rows have at least the prompt column (`config.prompt_key`); `reward` names the matching reward function.
    config_class: the data set's own config, a frozen dataclass of fields made by `option`; its keys are `data.NAME.*`,
    and the call is then `load(config, split, own=...)`. None: it has no keys.
    """

    name: str
    load: Callable[..., Any]
    reward: str
    config_class: type[C] | None = None

    def bound(self, config: schema.Config) -> DatasetSpec[C]:
        """Return a copy whose `load(config, split)` gives the run's own section of the config to this one's."""
        if self.config_class is None:
            return self
        return replace(self, load=partial(self.load, own=config.section(self.config_class)))


@dataclass(frozen=True)
class RolloutCapabilities:
    """The capabilities of a rollout engine.

    tensor_shards: several ranks can sample the same rows together, each with its shard of the layers (`rollout.tp`).
    continuous_batching: a waiting row takes the slot of a finished one while the other rows decode.
    adopts_weights: its `adopt` keeps the tensors that it gets and generates from them, so that no copy is made.
    shares_module: it generates with the train engine's own torch module, where it is lent one (`RolloutSetup.shared`).
    slots_key: config key of the number of sequences that a worker decodes at once.
    cache_key: config key of the MiB that a worker takes for keys and values.
    """

    tensor_shards: bool = False
    continuous_batching: bool = False
    adopts_weights: bool = False
    shares_module: bool = False
    slots_key: str | None = None
    cache_key: str | None = None


@dataclass(frozen=True)
class TrainCapabilities:
    """The capabilities of a train engine.

    kinds: the supported kinds of role.
    layouts: it spreads a model over pipeline stages, tensor shards and data-parallel ranks (`engine.pp`, `tp`, `dp`).
    Without it the engine has one worker, with the full model.
    offload: weights and optimizer state can leave the GPU while responses are sampled (`engine.offload`).
    adapters: it trains a LoRA adapter in place of all weights (`model.lora`).
    settings: config keys of the engine that decide time and memory of a step, by meaning. `shard`: data-parallel ranks
    that share one copy of the weights. `recompute`: activations are computed again in backward. `layerwise_above`:
    number of parameters above which layers are sharded one by one. `logits_chunk`: positions whose logits are in memory
    at one time. `padding_free`: sequences are packed without padding.
    """

    kinds: tuple[RoleKind, ...] = (POLICY,)
    layouts: bool = False
    offload: bool = False
    adapters: bool = False
    settings: Mapping[Setting, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutEngineSpec(Generic[C]):
    """A rollout engine, `rollout=NAME`.

    create: makes the engine, in each worker process that generates.
    config_class: the engine's own config, a frozen dataclass of fields made by `option`; its keys are `rollout.NAME.*`
    and `create` gets it as `setup.config`. None: it has no keys, and `setup.config` is None.
    check: raises ConfigError for a config that the engine cannot run; called before anything starts, with the run's
    config and, for each role with settings of its own, with the config as that role sees it.
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
    check: raises ConfigError for a config that the engine cannot run; called before anything starts, with the run's
    config and, for each role with settings of its own, with the config as that role sees it.
    check_layout: raises ConfigError when the engine's own config does not fit a role's layout; called for each role.
    """

    name: str
    create: Callable[[TrainSetup[C]], TrainEngine]
    config_class: type[C] | None = None
    capabilities: TrainCapabilities = TrainCapabilities()
    check: Callable[[schema.Config], None] | None = None
    check_layout: Callable[[C, Layout], None] | None = None


@dataclass(frozen=True)
class EnvironmentSpec(Generic[C]):
    """An environment of episodes, `env=NAME`. docs/environments.md has the contract of its class.

    environment: the class. One object is made for each episode, in a process of its own; with the argument
    `config.section(config_class)` if there is a `config_class`, else without one. A list of functions offers them as
    tools.
    load: returns that class or list for a run's config, in place of `environment`.
    play: plays the episodes itself, in each process that samples, in place of both (env=agent).
    config_class: the environment's own config, a frozen dataclass of fields made by `option`; its keys are
    `env.NAME.*`.
    scores: whether its episodes have a score, which is then the default reward. None: if the class has the method
    `score` or `get_reward`.
    imports: modules that an environment's process imports before its first episode.
    check: raises ConfigError for a config that cannot work; called before anything starts.
    on_start: called once in the driver when a run with this environment starts, to log what it should know.
    """

    name: str
    environment: Any = None
    load: Callable[[schema.Config], Any] | None = None
    play: Callable[[EpisodeSetup, RolloutEngine], EpisodeSource] | None = None
    config_class: type[C] | None = None
    scores: bool | None = None
    imports: tuple[str, ...] = ()
    check: Callable[[schema.Config], None] | None = None
    on_start: Callable[[], None] | None = None


@dataclass(frozen=True)
class ToolFormatSpec:
    """A form in which a model writes tool calls, `env.tool_format=NAME`; `format` parses them."""

    name: str
    format: ToolFormat


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
    """Workers of a plugin, in processes of their own: `run.group(NAME)`.

    worker: the class, a subclass of `rlcore.workers.Worker`; args: its arguments, the same for every rank.
    handle: called in the driver as `handle(group, config)`; `run.group` then returns its result in place of the
    WorkerGroup. A handle may have a method `end_step()`, called when a step has made its last call, that returns a
    function: it waits for the step's results and returns metrics by name.
    workers: ranks, each a process; cpus_per_worker and gpus_per_worker: of each. If a pool of `cluster.pools` lists
    NAME, there is one process on each of its places instead.

    The processes start with those of the roles, and stop with the run. A registered non-blocking method `start` is
    called once while the models load. A step's end waits for its running calls.
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
    """A command `rlcore NAME ...`; it returns the exit status: 0 done, 2 wrong input, 1 anything else.

    A name may be several words, such as "plugins test"; the command whose name fits most words of a line runs.
    Give one of two functions. `main(argv)` gets the unparsed words after the name. `run(line)` is for a command that
    works on a run's config: it gets a CommandLine with the parsed options, the plugins and the config, and the command
    takes rlcore's options (`-p`, `--config`, ...) and overrides; `options` adds its own to the parser.
    config: False for a `run` without `--config` and overrides. usage: the words before the overrides in the usage line,
    such as RUN_OR_MODEL.
    """

    name: str
    summary: str
    main: Callable[[list[str]], int] | None = None
    run: Callable[[CommandLine], int] | None = None
    options: Callable[[ArgumentParser], None] | None = None
    config: bool = True
    usage: str = ""


class Chooser(Protocol):
    """The part of PluginManager that `PluginKind.chosen` uses."""

    def specs(self, kind: type[S]) -> Mapping[str, S]:
        """Return the plugins' specs of one kind, by name."""

    def call(self, spec: Any, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a plugin's function; its errors name the plugin."""


def _nothing(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    return []


@dataclass(frozen=True)
class PluginKind:
    """A row of the table: a kind of spec that plugins give when they are loaded.

    spec: its dataclass, with a field `name`; no two plugins may give one name.
    hook: the registration hook that returns it.
    noun: its name in messages.
    group: the config group with the names as options; `values(name)` are the values that `GROUP=NAME` sets.
    keys: the dataclass of the keys `GROUP.*`, for a group that is not the core's; all of its fields have defaults.
    chosen: the names that a config chooses, each with the key that chose it; a chosen name must be installed, and a run
    needs its plugin to resume.
    entry_point: returns the one name that an entry point called so has to give, None where it gives none of the kind.
    Without it any entry point may give any number.
    """

    spec: type
    hook: str
    noun: str
    group: str | None = None
    keys: type | None = None
    values: Callable[[str], dict[str, Any]] = lambda name: {"name": name}
    chosen: Callable[[schema.Config, Chooser], list[tuple[str, str]]] = _nothing
    entry_point: Callable[[str], str | None] | None = None

    @property
    def has_sections(self) -> bool:
        """Whether a spec brings a config class, whose keys are `GROUP.NAME.*`, or `NAME.*` for a kind without group."""
        return any(part.name == "config_class" for part in fields(self.spec))

    def section(self, name: str) -> str:
        """Return the dotted name of the section of a spec of that name."""
        return name if self.group is None else f"{self.group}.{name}"


def _chosen_datasets(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    own = [(f"eval.sets.{name}.data.name", set_config(config, name).data.name) for name in config.eval.sets]
    mixed = [(f"data.mix.{name}.data.name", source_config(config, name).data.name) for name in config.data.mix]
    return [("data.name", config.data.name), *mixed, *own]


def _chosen_rewards(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    found = _rewards_of(config, plugins)
    further = {f"data.mix.{name}": source_config(config, name) for name in config.data.mix}
    further |= {f"eval.sets.{name}": set_config(config, name) for name in config.eval.sets}
    for path, own in further.items():
        for key, reward in _rewards_of(own, plugins):
            found.append((f"{path}{'.' if key == 'reward.functions' else ', '}{key}", reward))
    return found


def _rewards_of(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    reward, data = config.reward, config.data.name
    if reward.path is not None:
        return []
    if reward.functions:
        return [("reward.functions", name) for name in reward.functions if ":" not in name]
    if has_scores(config, plugins):
        return [(f"the reward of env={environment_of(config)}", ENVIRONMENT_REWARD)]
    dataset = plugins.specs(DatasetSpec).get(data)
    return [] if dataset is None else [(f"the reward of data={data}", dataset.reward)]


ENVIRONMENT_REWARD = "environment"
"""The reward function that returns the environment's score of an episode."""


def environment_of(config: schema.Config) -> str:
    """Return the name of the run's environment; "" if it has none."""
    section = config.sections.get("env")
    return section.name if isinstance(section, EnvConfig) else ""


def has_scores(config: schema.Config, plugins: Chooser) -> bool:
    """Whether the run's environment scores its episodes."""
    spec = plugins.specs(EnvironmentSpec).get(environment_of(config))
    if spec is None:
        return False
    if spec.scores is not None:
        return spec.scores
    target = spec.environment if spec.load is None else spec.load(config)
    return hasattr(target, "score") or hasattr(target, "get_reward")


def _of_roles(
    config: schema.Config, plugins: Chooser, key: str, own: Callable[[Role | schema.RoleConfig], str | None]
) -> list[tuple[str, str]]:
    """Return the engines of single roles: those that the algorithm declares, and the user's in place of them."""
    spec = plugins.specs(AlgorithmSpec).get(config.algorithm)
    declared: Mapping[str, Role] = {}
    if spec is not None:
        algorithm = plugins.call(spec, "__init__", spec.algorithm, config.algo)
        declared = plugins.call(spec, "roles", algorithm.roles)
    found = {f"roles.{role}.{key}": own(settings) for role, settings in declared.items()}
    for role, given in config.roles.items():
        found[f"roles.{role}.{key}"] = own(given) or found.get(f"roles.{role}.{key}")
    return [(path, name) for path, name in found.items() if name is not None]


def _chosen_rollout_engines(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    own = _of_roles(config, plugins, "rollout.name", lambda role: role.rollout.get("name"))
    return [("rollout.name", config.rollout.name), *own]


def _chosen_train_engines(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    own = _of_roles(config, plugins, "engine", lambda role: role.engine)
    return [("engine.name", config.engine.name), *own]


def _chosen_sections(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    given = {name: section for name, section in config.sections.items() if name in plugins.specs(ConfigSpec)}
    return [(name, name) for name, section in given.items() if section != type(section)()]


def _chosen_tool_formats(config: schema.Config, plugins: Chooser) -> list[tuple[str, str]]:
    if not environment_of(config) or (name := config.section(EnvConfig).tool_format) == "auto":
        return []
    return [("env.tool_format", name)]


PLUGIN_KINDS = (
    PluginKind(
        AlgorithmSpec,
        "rlcore_algorithm",
        "algorithm",
        group="algo",
        chosen=lambda config, _: [("algo", config.algorithm)] if config.algorithm else [],
        entry_point=algorithm_of,
    ),
    PluginKind(
        DatasetSpec,
        "rlcore_datasets",
        "data set",
        group="data",
        chosen=_chosen_datasets,
    ),
    PluginKind(
        RewardSpec,
        "rlcore_rewards",
        "reward",
        group="reward",
        values=lambda name: {"functions": {name: 1.0}},
        chosen=_chosen_rewards,
    ),
    PluginKind(
        RolloutEngineSpec,
        "rlcore_rollout_engines",
        "rollout engine",
        group="rollout",
        chosen=_chosen_rollout_engines,
    ),
    PluginKind(
        TrainEngineSpec,
        "rlcore_train_engines",
        "train engine",
        group="engine",
        chosen=_chosen_train_engines,
    ),
    PluginKind(
        TrackerSpec,
        "rlcore_trackers",
        "tracker",
        group="tracker",
        values=lambda name: {"use": [name]},
        chosen=lambda config, _: [("tracker.use", name) for name in config.tracker.use],
    ),
    PluginKind(
        EnvironmentSpec,
        "rlcore_environments",
        "environment",
        group="env",
        keys=EnvConfig,
        chosen=lambda config, _: [("env.name", name)] if (name := environment_of(config)) else [],
    ),
    PluginKind(ToolFormatSpec, "rlcore_tool_formats", "tool format", chosen=_chosen_tool_formats),
    PluginKind(ConfigSpec, "rlcore_configs", "config section", chosen=_chosen_sections),
    PluginKind(CommandSpec, "rlcore_commands", "command", entry_point=command_of),
)
"""All kinds, in the order in which plugins are asked for them."""
