"""Loads plugin modules, collects their specs and faults, and calls their hooks. PluginManager is the interface."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pluggy

from rlcore.errors import RLCoreError
from rlcore.plugins import checks, hookspecs
from rlcore.plugins.entries import GROUP, OBJECT, BrokenPlugin, PluginInfo, cause_of
from rlcore.plugins.specs import PLUGIN_KINDS, PluginKind

_log = logging.getLogger("rlcore.plugins")

S = TypeVar("S")


@dataclass
class SpecRegistry:
    """The plugins' specs by class and name, and the plugin that gave each."""

    specs: dict[type, dict[str, Any]] = field(default_factory=lambda: {kind.spec: {} for kind in PLUGIN_KINDS})
    givers: dict[tuple[type, str], str] = field(default_factory=dict)

    def add(self, spec: Any, plugin: str) -> None:
        """Add a plugin's spec."""
        self.specs[type(spec)][spec.name] = spec
        self.givers[type(spec), spec.name] = plugin

    def of(self, plugin: str) -> list[tuple[type, str]]:
        """Return the class and name of each of a plugin's specs."""
        return [key for key, giver in self.givers.items() if giver == plugin]

    def remove(self, plugin: str) -> None:
        """Remove all specs of a plugin."""
        for kind, name in self.of(plugin):
            del self.specs[kind][name], self.givers[kind, name]


class LoadedPlugins:
    """Plugins by name: their facts (`infos`), modules or objects, and specs (`given`).

    A fault breaks only its own plugin.
    """

    def __init__(self, *, trace: bool = False) -> None:
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self._trace = trace
        self.infos: dict[str, PluginInfo] = {}
        self.modules: dict[str, Any] = {}
        self.given = SpecRegistry()

    def load(self, info: PluginInfo, load: Callable[[], tuple[object, str | None]], *, blocked: bool) -> None:
        """Import a plugin and register its hooks; record its faults."""
        if blocked:
            self.infos.setdefault(info.name, replace(info, state="blocked"))
            return
        other = self.infos.get(info.name)
        if other is not None:
            fault = f"{other} has the same name; rename or uninstall one of them"
            self.infos[f"{info.name} {len(self.infos)}"] = info.broken(fault)  # any key that is free
            return
        self.infos[info.name] = info
        try:
            module, sha256 = load()
        except RLCoreError as error:
            self._break(info, str(error))
            return
        # SystemExit too: a module that calls sys.exit must not end the command without a word.
        except (Exception, SystemExit) as error:
            self._break(info, f"importing it failed: {cause_of(error)}")
            return
        functions = checks.hooks_of(module)
        hooks = tuple(name for name in checks.HOOKS if name in functions)
        info = replace(info, file=getattr(module, "__file__", None), sha256=sha256, hooks=hooks)
        self.infos[info.name] = info
        if faults := checks.module_faults(module, functions):
            self._break(info, *faults)
            return
        try:
            self._pluggy.register(module, name=info.name)
        except ValueError:
            name = getattr(module, "__name__", type(module).__name__)
            self._break(info, f"its module {name!r} is already loaded under another plugin name")
            return
        self.modules[info.name] = module
        if sha256 is not None:
            _log.info("loaded %s, sha256 %s", info, sha256)

    def register(self, kind: PluginKind) -> None:
        """Collect the plugins' specs of one kind."""
        # A list, as breaking a plugin changes the implementations.
        for info, call in list(self.calls(kind.hook)):
            try:
                given = specs_of(call())
            except RLCoreError as error:
                self._break(info, *(error.faults if isinstance(error, BrokenPlugin) else [str(error)]))
                continue
            for spec in given:
                fault = checks.spec_fault(kind.hook, spec, kind.spec)
                if fault is None and (other := self.given.givers.get((kind.spec, spec.name))) is not None:
                    fault = taken(kind.hook, spec.name, self.infos[other])
                if fault is not None:
                    self._break(info, fault)
                    break
                self.given.add(spec, info.name)

    def finish(self, info: PluginInfo) -> None:
        """Record a plugin's spec, and check it against the entry point's name: `--help` lists names without import."""
        if info.state != "loaded":
            return
        given = self.given.of(info.name)
        nouns = {kind.spec: kind.noun for kind in PLUGIN_KINDS}
        self.infos[info.name] = replace(info, gives=tuple(f"{nouns[spec]} {name}" for spec, name in given))
        for kind in PLUGIN_KINDS if info.kind not in ("local", OBJECT) else ():
            if kind.entry_point is None:
                continue
            promised = [name for name in [kind.entry_point(info.name)] if name is not None]
            names = [name for spec, name in given if spec is kind.spec]
            if names != promised:
                self._break(
                    info,
                    f"by its entry point's name, {kind.hook}() gives {_quoted(promised)}; it gave {_quoted(names)}. "
                    "Make them equal: an algorithm's entry point has the algorithm's name, a command's is "
                    "command.NAME, with a dot for each space",
                )
                return

    def _break(self, info: PluginInfo, *faults: str) -> None:
        """Record a plugin's faults, and remove its specs."""
        self.infos[info.name] = self.infos[info.name].broken(*faults)
        self.given.remove(info.name)
        if self.modules.pop(info.name, None) is not None:
            self._pluggy.unregister(name=info.name)

    def calls(self, hook: str, **arguments: Any) -> Iterator[tuple[PluginInfo, Callable[[], Any]]]:
        """Yield each implementation, in order, as its plugin and a call that names the plugin in its errors."""
        # Called one by one, not through pluggy, so that an error has its plugin's name.
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            info = self.infos[implementation.plugin_name]
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
        except (Exception, SystemExit) as error:
            raise BrokenPlugin(info, f"{hook}() failed: {cause_of(error)}") from error
        finally:
            if self._trace:
                seconds = time.perf_counter() - start
                print(f"hook {hook} {info.name} {1000 * seconds:.1f} ms", file=sys.stderr, flush=True)


def specs_of(given: Any) -> Sequence[Any]:
    """Return a registration hook's result as a list."""
    return given if isinstance(given, (list, tuple)) else [given]


def taken(hook: str, name: str, other: PluginInfo) -> str:
    """Return the fault of a name that another plugin has given."""
    return f"{hook}() gives the name {name!r}, which {other} has given already"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
