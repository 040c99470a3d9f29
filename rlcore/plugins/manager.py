"""Find, load, check, list and call plugins."""

from __future__ import annotations

import importlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import pluggy

from rlcore.errors import ConfigError, PluginError, RLCoreError, did_you_mean
from rlcore.plugins import checks, hookspecs
from rlcore.plugins.local import load_file
from rlcore.plugins.specs import (
    AlgorithmSpec,
    CommandSpec,
    ConfigSpec,
    DatasetSpec,
    RewardSpec,
    RolloutEngineSpec,
    TrackerSpec,
    TrainEngineSpec,
    WorkerSpec,
)

if TYPE_CHECKING:
    from rlcore.config import Config

GROUP = "rlcore"
_REGISTRATIONS: dict[str, type] = {
    "rlcore_algorithm": AlgorithmSpec,
    "rlcore_rewards": RewardSpec,
    "rlcore_datasets": DatasetSpec,
    "rlcore_rollout_engines": RolloutEngineSpec,
    "rlcore_train_engines": TrainEngineSpec,
    "rlcore_configs": ConfigSpec,
    "rlcore_trackers": TrackerSpec,
    "rlcore_commands": CommandSpec,
}
_log = logging.getLogger("rlcore.plugins")

S = TypeVar("S")


@dataclass(frozen=True)
class PluginInfo:
    """One plugin: a row of `rlcore plugins`.

    `kind` is "algorithm", what stands before the dot of the entry point's name, or "local" for a file; `file` is None
    while it is not known, that is for a blocked plugin; `sha256` (hex) is that of a local file.
    """

    name: str
    kind: str
    distribution: str | None
    version: str | None
    file: str | None
    hooks: tuple[str, ...] = ()
    state: Literal["loaded", "blocked"] = "loaded"
    sha256: str | None = None

    def __str__(self) -> str:
        origin = [f"{self.distribution} {self.version}" if self.distribution else "local file", self.file or ""]
        return f"plugin {self.name!r} ({', '.join(part for part in origin if part)})"


def installed() -> list[EntryPoint]:
    """Return the installed plugins' entry points in the order of loading, from metadata alone: nothing is imported."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (not _is_own(entry), entry.name))


def own_engines() -> PluginManager:
    """Load rlcore's own engines only, for their config sections: quick, as their plugin modules import no torch."""
    others = [entry.name for entry in installed() if not (_is_own(entry) and entry.name.startswith("engine."))]
    return PluginManager.load([f"no:{name}" for name in others])


class PluginManager:
    """The plugins of one command, loaded and checked. Make one with `PluginManager.load`.

    The methods named after kinds return what the registration hooks gave, by name, in the order of loading. Those named
    after life-cycle hooks call them; see `rlcore.plugins.hookspecs` for order and errors.
    """

    def __init__(self, *, trace: bool = False) -> None:
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self._trace = trace
        self._infos: dict[str, PluginInfo] = {}
        self._modules: dict[str, ModuleType] = {}
        self._specs: dict[type, dict[str, Any]] = {kind: {} for kind in _REGISTRATIONS.values()}
        self._givers: dict[tuple[type, str], PluginInfo] = {}

    @classmethod
    def load(cls, options: Sequence[str] = (), *, trace: bool = False) -> Self:
        """Load all installed plugins, then the local files, and register what they give.

        options: as behind `-p`: "path/file.py" loads a file, "no:NAME" blocks a plugin.
        trace: print each hook call and its time to stderr.
        Raises PluginError for a plugin that cannot be loaded or breaks the contract, and for an option that fits none.
        """
        manager = cls(trace=trace)
        blocked = [option.removeprefix("no:") for option in options if option.startswith("no:")]
        entries = installed()
        files = [Path(option) for option in options if not option.startswith("no:")]
        _check_blocked(blocked, [entry.name for entry in entries] + [file.stem for file in files])
        for entry in entries:
            manager._load_entry(entry, blocked=entry.name in blocked)
        for file in files:
            manager._load_local(file, blocked=file.stem in blocked)
        for hook, kind in _REGISTRATIONS.items():
            manager._register(hook, kind)
        for info in manager._infos.values():
            manager._check_promise(info)
        return manager

    # What is there.

    def list(self) -> Sequence[PluginInfo]:
        """Return all plugins, blocked ones included, in the order of loading."""
        return [*self._infos.values()]

    def algorithm(self, name: str) -> AlgorithmSpec:
        """Return the algorithm of that name; raises PluginError with the nearest name and what to do."""
        found = self.algorithms()
        if name not in found:
            raise PluginError(
                f"algorithm {name!r} is not installed.{did_you_mean(name, found)} "
                f"Installed: {', '.join(found) or 'none'}. "
                "Install its distribution (rlcore-plugin-...) or give its file with -p FILE.py"
            )
        return found[name]

    def used_by(self, config: Config) -> Sequence[PluginInfo]:
        """Return the plugins without which a run of this config cannot go on, in the order of loading."""
        rewards = list(config.reward.functions)
        if not rewards and config.reward.path is None and config.data.name in self.datasets():
            rewards = [self.datasets()[config.data.name].reward]
        chosen = {
            (AlgorithmSpec, config.algorithm),
            (DatasetSpec, config.data.name),
            (RolloutEngineSpec, config.rollout.name),
            (TrainEngineSpec, config.engine.name),
            *((RewardSpec, name) for name in rewards),
            *((TrackerSpec, name) for name in config.tracker.use),
            *((ConfigSpec, name) for name, spec in self.configs().items() if _is_set(config, spec)),
        }
        names = {giver.name for key, giver in self._givers.items() if key in chosen}
        return [info for info in self._infos.values() if info.name in names]

    def algorithms(self) -> Mapping[str, AlgorithmSpec]:
        """Return the algorithms by name."""
        return self._specs[AlgorithmSpec]

    def rewards(self) -> Mapping[str, RewardSpec]:
        """Return the reward functions by name."""
        return self._specs[RewardSpec]

    def datasets(self) -> Mapping[str, DatasetSpec]:
        """Return the data sets by name."""
        return self._specs[DatasetSpec]

    def rollout_engines(self) -> Mapping[str, RolloutEngineSpec]:
        """Return the rollout engines by name."""
        return self._specs[RolloutEngineSpec]

    def train_engines(self) -> Mapping[str, TrainEngineSpec]:
        """Return the train engines by name."""
        return self._specs[TrainEngineSpec]

    def configs(self) -> Mapping[str, ConfigSpec]:
        """Return the config sections of plugins by name."""
        return self._specs[ConfigSpec]

    def sections(self) -> Mapping[str, type]:
        """Return the config classes that plugins bring, by dotted name: `judge`, `rollout.NAME`, `engine.NAME`."""
        found = {name: spec.config_class for name, spec in self.configs().items()}
        for group, specs in (("rollout", self.rollout_engines()), ("engine", self.train_engines())):
            found |= {f"{group}.{name}": spec.config_class for name, spec in specs.items() if spec.config_class}
        return found

    def trackers(self) -> Mapping[str, TrackerSpec]:
        """Return the trackers by name."""
        return self._specs[TrackerSpec]

    def commands(self) -> Mapping[str, CommandSpec]:
        """Return the commands by name."""
        return self._specs[CommandSpec]

    @property
    def by_value_modules(self) -> Sequence[ModuleType]:
        """The modules loaded from a path: workers do not have them, so they are sent by value."""
        return [self._modules[name] for name in self.local_files]

    @property
    def local_files(self) -> Mapping[str, tuple[Path, str]]:
        """Path and sha256 (hex) of each plugin that was loaded from a path, by name."""
        return {
            info.name: (Path(info.file), info.sha256)
            for info in self._infos.values()
            if info.file is not None and info.sha256 is not None
        }

    # Life-cycle hooks.

    def place_roles(self, config: Config) -> Config:
        """Call rlcore_place_roles; return the first answer. Raises ConfigError when no plugin has one."""
        for _, call in self._calls("rlcore_place_roles", config=config, plugins=self):
            placed: Config | None = call()
            if placed is not None:
                return placed
        raise ConfigError(
            "cluster.pools=auto needs a plugin that plans: pip install rlcore-plugin-plan (in a checkout: "
            "pip install -e plugins/rlcore-plugin-plan), or list the pools, as cluster.pools={main: [actor, ref]}"
        )

    def workers(self, config: Config) -> Mapping[str, WorkerSpec]:
        """Call rlcore_workers; return the workers of plugins by name."""
        found: dict[str, WorkerSpec] = {}
        givers: dict[str, PluginInfo] = {}
        for info, spec in self._given("rlcore_workers", WorkerSpec, config=config):
            if spec.name in found:
                raise _taken(info, "rlcore_workers", spec.name, givers[spec.name])
            found[spec.name], givers[spec.name] = spec, info
        return found

    def check_config(self, config: Config) -> None:
        """Call rlcore_check_config."""
        self._call_all("rlcore_check_config", config=config)

    def run_start(self, run: Any) -> None:
        """Call rlcore_run_start."""
        self._call_all("rlcore_run_start", run=run)

    def step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Call rlcore_step_end."""
        self._call_all("rlcore_step_end", run=run, step=step, metrics=metrics)

    def checkpoint(self, run: Any, path: Path) -> None:
        """Call rlcore_checkpoint."""
        self._call_all("rlcore_checkpoint", run=run, path=path)

    def run_end(self, run: Any, status: str) -> None:
        """Call rlcore_run_end on every plugin, then raise the first error."""
        first: RLCoreError | None = None
        for info, call in self._calls("rlcore_run_end", run=run, status=status):
            try:
                call()
            except RLCoreError as error:
                _log.error("%s failed in rlcore_run_end: %s", info, error)
                first = first or error
        if first is not None:
            raise first

    # Loading.

    def _load_entry(self, entry: EntryPoint, *, blocked: bool) -> None:
        distribution, version = _distribution(entry)
        kind = entry.name.partition(".")[0] if "." in entry.name else "algorithm"
        info = PluginInfo(entry.name, kind, distribution, version, None, state="blocked" if blocked else "loaded")
        self._add(info)
        if not blocked:
            self._load(info, lambda: _import_entry(entry))

    def _load_local(self, path: Path, *, blocked: bool) -> None:
        info = PluginInfo(path.stem, "local", None, None, str(path), state="blocked" if blocked else "loaded")
        self._add(info)
        if not blocked:
            self._load(info, lambda: load_file(path))

    def _add(self, info: PluginInfo) -> None:
        if info.name in self._infos:
            raise _broken(info, f"{self._infos[info.name]} has the same name; rename or uninstall one of them")
        self._infos[info.name] = info

    def _load(self, info: PluginInfo, load: Callable[[], tuple[ModuleType, str | None]]) -> None:
        try:
            module, sha256 = load()
        except RLCoreError as error:
            raise _broken(info, str(error)) from error
        except (Exception, SystemExit) as error:
            raise _broken(info, f"importing it failed: {_cause(error)}") from error
        info = replace(info, file=getattr(module, "__file__", None), sha256=sha256)
        functions = checks.hooks_of(module)
        faults = [checks.api_fault(module), *(checks.hook_fault(*item) for item in functions.items())]
        if not functions:
            faults.append(f"it implements no hook; mark functions with @hookimpl. Hooks: {', '.join(checks.HOOKS)}")
        for fault in faults:
            if fault is not None:
                raise _broken(info, fault)
        try:
            self._pluggy.register(module, name=info.name)
        except ValueError as error:
            raise _broken(
                info, f"its module {module.__name__!r} is already loaded under another plugin name"
            ) from error
        self._modules[info.name] = module
        self._infos[info.name] = replace(info, hooks=tuple(name for name in checks.HOOKS if name in functions))
        if sha256 is not None:
            _log.info("loaded %s, sha256 %s", info, sha256)

    def _register(self, hook: str, kind: type) -> None:
        for info, spec in self._given(hook, kind):
            if (other := self._givers.get((kind, spec.name))) is not None:
                raise _taken(info, hook, spec.name, other)
            self._givers[kind, spec.name] = info
            self._specs[kind][spec.name] = spec

    def _given(self, hook: str, kind: type, **arguments: Any) -> Iterator[tuple[PluginInfo, Any]]:
        """Call a hook that gives specs; yield each spec, checked, with its plugin."""
        for info, call in self._calls(hook, **arguments):
            given = call()
            for spec in given if isinstance(given, (list, tuple)) else [given]:
                if (fault := checks.spec_fault(hook, spec, kind)) is not None:
                    raise _broken(info, fault)
                yield info, spec

    def _check_promise(self, info: PluginInfo) -> None:
        """Check that an entry point gives the algorithm or command of its name: `--help` lists them without import."""
        if info.kind == "local" or info.state == "blocked":
            return
        for kind, hook, promised in (
            (AlgorithmSpec, "rlcore_algorithm", [info.name] if info.kind == "algorithm" else []),
            (CommandSpec, "rlcore_commands", [info.name.partition(".")[2]] if info.kind == "command" else []),
        ):
            given = [name for (spec, name), giver in self._givers.items() if spec is kind and giver.name == info.name]
            if given != promised:
                raise _broken(
                    info,
                    f"by its entry point's name, {hook}() gives {_names(promised)}; it gave {_names(given)}. Make them "
                    "equal: an algorithm's entry point has the algorithm's name, a command's is command.NAME",
                )

    # Calling.

    def _calls(self, hook: str, **arguments: Any) -> Iterator[tuple[PluginInfo, Callable[[], Any]]]:
        """Give, in order, each implementation as a plugin and a call that names the plugin in its errors."""
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            info = self._infos[implementation.plugin_name]
            values = [arguments[name] for name in implementation.argnames]
            yield (
                info,
                lambda info=info, function=implementation.function, values=values: self._call(  # type: ignore[misc]
                    info, hook, function, values
                ),
            )

    def _call(self, info: PluginInfo, hook: str, function: Callable[..., S], values: Sequence[Any]) -> S:
        start = time.perf_counter()
        try:
            return function(*values)
        except RLCoreError:
            raise
        except Exception as error:
            raise _broken(info, f"{hook}() failed: {_cause(error)}") from error
        finally:
            if self._trace:
                seconds = time.perf_counter() - start
                print(f"hook {hook} {info.name} {1000 * seconds:.1f} ms", file=sys.stderr, flush=True)

    def _call_all(self, hook: str, **arguments: Any) -> None:
        for _, call in self._calls(hook, **arguments):
            call()


def _is_set(config: Config, spec: ConfigSpec) -> bool:
    """Whether a config has values in a plugin's section that are not the defaults."""
    return config.sections.get(spec.name, spec.config_class()) != spec.config_class()


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    # Typed optional, but always set on the entry points that entry_points() gives.
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("unknown", "unknown")


def _is_own(entry: EntryPoint) -> bool:
    return _distribution(entry)[0] == "rlcore"


def _import_entry(entry: EntryPoint) -> tuple[ModuleType, None]:
    if entry.attr:
        raise PluginError(f"its entry point is {entry.value!r}; it must name a module, without ':'")
    return importlib.import_module(entry.module), None


def _check_blocked(blocked: Sequence[str], names: Sequence[str]) -> None:
    for name in blocked:
        if name not in names:
            raise PluginError(
                f"-p no:{name} blocks nothing: no plugin has that name.{did_you_mean(name, names)} "
                f"Plugins: {', '.join(names)}"
            )


def _broken(info: PluginInfo, cause: str) -> PluginError:
    return PluginError(f"{info}: {cause}\nTo go on without it: -p no:{info.name}")


def _taken(info: PluginInfo, hook: str, name: str, other: PluginInfo) -> PluginError:
    return _broken(info, f"{hook}() gives the name {name!r}, which {other} has given already")


def _cause(error: BaseException) -> str:
    """Name the error and the place where it was raised."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and Path(frame.filename).is_file()  # not importlib's own
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
