"""The plugins of one command: found, loaded, checked, listed and called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlcore.errors import ConfigError, PluginError, RLCoreError, did_you_mean
from rlcore.plugins import checks
from rlcore.plugins.entries import (
    OBJECT,
    BrokenPlugin,
    PluginInfo,
    cause_of,
    check_blocked,
    import_entry,
    info_of,
    installed,
    is_own,
)
from rlcore.plugins.loading import LoadedPlugins, specs_of, taken
from rlcore.plugins.local import load_file
from rlcore.plugins.specs import (
    PLUGIN_KINDS,
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

_log = logging.getLogger("rlcore.plugins")

S = TypeVar("S")
T = TypeVar("T")


def own_engines() -> PluginManager:
    """Load rlcore's own engines only: quick, as their plugin modules import no torch."""
    return PluginManager.load_only([e for e in installed() if is_own(e) and e.name.startswith("engine.")])


def own_sections() -> Mapping[str, type]:
    """Return the config classes of rlcore's own engines and trackers, by dotted name. Imports no torch."""
    own = [e for e in installed() if is_own(e) and e.name.startswith(("engine.", "tracker."))]
    return PluginManager.load_only(own).sections()


class PluginManager:
    """The plugins of one command, loaded and checked. Make one with `PluginManager.load`.

    `specs` returns the specs of the registration hooks, by name, in the order of loading; the methods named after kinds
    are short for it. The methods named after life-cycle hooks call those hooks; see `rlcore.plugins.hookspecs` for
    order and errors.
    """

    def __init__(self, *, trace: bool = False) -> None:
        self._loaded = LoadedPlugins(trace=trace)

    @classmethod
    def load(
        cls, options: Sequence[str] = (), *, objects: Mapping[str, object] | None = None, trace: bool = False
    ) -> Self:
        """Load all installed plugins, then the local files, then the objects, and register their specs.

        options: the values of `-p`: "path/file.py" loads a file, "no:NAME" blocks a plugin.
        objects: by name; their methods marked with `@hookimpl` are hooks.
        trace: print each hook call and its time to stderr. Raises PluginError for a plugin that cannot be loaded or
        breaks the contract, and for an option without a plugin.
        """
        return cls.inspect(options, objects=objects, trace=trace)._sound()

    def _sound(self) -> Self:
        """Return the manager; PluginError when one of its plugins is broken."""
        broken = [info for info in self.list() if info.faults]
        if broken:
            more = f"\nMore plugins are broken ({len(broken) - 1}): rlcore plugins lists all" if broken[1:] else ""
            raise PluginError(f"{BrokenPlugin(broken[0], *broken[0].faults)}{more}")
        return self

    @classmethod
    def load_only(cls, entries: Sequence[EntryPoint]) -> Self:
        """Load the installed plugins of these entry points, and import no other. Raises as `load` does."""
        return cls.inspect(entries=entries)._sound()

    @classmethod
    def inspect(
        cls,
        options: Sequence[str] = (),
        *,
        objects: Mapping[str, object] | None = None,
        trace: bool = False,
        entries: Sequence[EntryPoint] | None = None,
    ) -> Self:
        """Do as `load`, but leave out broken plugins: `list` then has all faults of all plugins.

        entries: the installed plugins to load (default: all).
        Raises PluginError only for an option that fits no plugin.
        """
        manager = cls(trace=trace)
        blocked = [option.removeprefix("no:") for option in options if option.startswith("no:")]
        entries = installed() if entries is None else entries
        files = [Path(option) for option in options if not option.startswith("no:")]
        check_blocked(blocked, [entry.name for entry in entries] + [file.stem for file in files])
        for entry in entries:
            info = info_of(entry)
            manager._loaded.load(info, lambda entry=entry: import_entry(entry), blocked=info.name in blocked)  # type: ignore[misc]
        for file in files:
            info = PluginInfo(file.stem, "local", None, None, str(file))
            manager._loaded.load(info, lambda file=file: load_file(file), blocked=info.name in blocked)  # type: ignore[misc]
        for name, each in (objects or {}).items():
            info = PluginInfo(name, OBJECT, None, None, None)
            manager._loaded.load(info, lambda each=each: (each, None), blocked=False)  # type: ignore[misc]
        for kind in PLUGIN_KINDS:
            manager._loaded.register(kind)
        for info in manager.list():
            manager._loaded.finish(info)
        return manager

    # Plugins and specs

    def list(self) -> Sequence[PluginInfo]:
        """Return all plugins, blocked and broken ones included, in the order of loading."""
        return [*self._loaded.infos.values()]

    def specs(self, kind: type[S]) -> Mapping[str, S]:
        """Return the plugins' specs of one kind, by name: `specs(RewardSpec)`."""
        return self._loaded.given.specs[kind]

    def algorithm(self, name: str) -> AlgorithmSpec:
        """Return the algorithm of that name; PluginError, with the nearest name and a remedy, for an unknown one."""
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
        chosen = [(kind.spec, name) for kind in PLUGIN_KINDS for _, name in kind.chosen(config, self)]
        names = {self._loaded.given.givers[key] for key in chosen if key in self._loaded.given.givers}
        return [info for info in self.list() if info.name in names]

    def check_names(self, config: Config) -> None:
        """Raise ConfigError for a name in the config that no plugin has given."""
        for kind in PLUGIN_KINDS:
            found: Mapping[str, Any] = self.specs(kind.spec)
            for key, name in kind.chosen(config, self):
                if name not in found:
                    raise ConfigError(
                        f"{key} = {name!r} is not installed.{did_you_mean(name, found)} "
                        f"Installed: {', '.join(found) or 'none'}"
                    )

    def sections(self) -> Mapping[str, type]:
        """Return the plugins' config classes by dotted name: `judge`, `rollout.NAME`, `engine.NAME`."""
        found: dict[str, type] = {kind.group: kind.keys for kind in PLUGIN_KINDS if kind.group and kind.keys}
        # Sections without a dot first: the others are inside of them, or of the core's.
        for kind in sorted(PLUGIN_KINDS, key=lambda kind: kind.group is not None):
            if kind.has_sections:
                specs: Mapping[str, Any] = self.specs(kind.spec)
                found |= {kind.section(name): spec.config_class for name, spec in specs.items() if spec.config_class}
        return found

    def used_sections(self, config: Config) -> Collection[str]:
        """See rlcore.config.installed."""
        used = {kind.group for kind in PLUGIN_KINDS if kind.group and kind.keys}
        for kind in PLUGIN_KINDS:
            if kind.has_sections:
                names = self.specs(kind.spec) if kind.group is None else [name for _, name in kind.chosen(config, self)]
                used |= {kind.section(name) for name in names}
        return used

    def options(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """Return the options that plugins add to config groups: the values that GROUP=NAME sets, by group and name."""
        return {
            (kind.group, name): kind.values(name)
            for kind in PLUGIN_KINDS
            if kind.group is not None
            for name in self.specs(kind.spec)
        }

    def algorithms(self) -> Mapping[str, AlgorithmSpec]:
        """Return the algorithms by name."""
        return self.specs(AlgorithmSpec)

    def rewards(self) -> Mapping[str, RewardSpec]:
        """Return the reward functions by name."""
        return self.specs(RewardSpec)

    def datasets(self) -> Mapping[str, DatasetSpec]:
        """Return the data sets by name."""
        return self.specs(DatasetSpec)

    def rollout_engines(self) -> Mapping[str, RolloutEngineSpec]:
        """Return the rollout engines by name."""
        return self.specs(RolloutEngineSpec)

    def train_engines(self) -> Mapping[str, TrainEngineSpec]:
        """Return the train engines by name."""
        return self.specs(TrainEngineSpec)

    def configs(self) -> Mapping[str, ConfigSpec]:
        """Return the config sections of plugins by name."""
        return self.specs(ConfigSpec)

    def trackers(self) -> Mapping[str, TrackerSpec]:
        """Return the trackers by name."""
        return self.specs(TrackerSpec)

    def commands(self) -> Mapping[str, CommandSpec]:
        """Return the commands by name."""
        return self.specs(CommandSpec)

    @property
    def by_value_modules(self) -> Sequence[ModuleType]:
        """The modules loaded from a path: workers do not have them, so they are sent by value."""
        return [self._loaded.modules[name] for name in self.local_files]

    @property
    def local_files(self) -> Mapping[str, tuple[Path, str]]:
        """Path and sha256 (hex) of each plugin that was loaded from a path, by name."""
        return {
            info.name: (Path(info.file), info.sha256)
            for info in self._loaded.infos.values()
            if info.file is not None and info.sha256 is not None
        }

    def call(self, spec: Any, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a plugin's function `name`, which a spec or its class brings.

        An exception that is none of rlcore's becomes a PluginError with the plugin, the file and the line.
        """
        try:
            return function(*arguments)
        except RLCoreError:
            raise
        except (Exception, SystemExit) as error:
            info = self._loaded.infos[self._loaded.given.givers[type(spec), spec.name]]
            raise BrokenPlugin(info, f"{name}() of {spec.name!r} failed: {cause_of(error)}") from error

    # Life-cycle hooks

    def place_roles(self, config: Config) -> Config:
        """Call rlcore_place_roles; return the first answer. Raises ConfigError when no plugin has one."""
        for _, call in self._loaded.calls("rlcore_place_roles", config=config, plugins=self):
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
        for info, call in self._loaded.calls("rlcore_workers", config=config):
            for spec in specs_of(call()):
                if fault := checks.spec_fault("rlcore_workers", spec, WorkerSpec):
                    raise BrokenPlugin(info, fault)
                if spec.name in found:
                    raise BrokenPlugin(info, taken("rlcore_workers", spec.name, givers[spec.name]))
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
        for info, call in self._loaded.calls("rlcore_run_end", run=run, status=status):
            try:
                call()
            except RLCoreError as error:
                _log.error("%s failed in rlcore_run_end: %s", info, error)
                first = first or error
        if first is not None:
            raise first

    def _call_all(self, hook: str, **arguments: Any) -> None:
        for _, call in self._loaded.calls(hook, **arguments):
            call()
