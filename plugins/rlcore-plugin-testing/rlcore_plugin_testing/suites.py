"""The table of suites, one for each kind of plugin that has one, and the suite that a name asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore import PluginError, PluginManager, did_you_mean
from rlcore_plugin_testing.algorithm import checks as algorithm_checks
from rlcore_plugin_testing.algorithm.suite import AlgorithmSuite
from rlcore_plugin_testing.environment import checks as environment_checks
from rlcore_plugin_testing.environment.suite import EnvironmentSuite
from rlcore_plugin_testing.report import CheckSuite
from rlcore_plugin_testing.rollout_engine import checks as rollout_engine_checks
from rlcore_plugin_testing.rollout_engine.suite import RolloutEngineSuite
from rlcore_plugin_testing.train_engine import checks as train_engine_checks
from rlcore_plugin_testing.train_engine.suite import TrainEngineSuite


@dataclass(frozen=True)
class SuiteEntry:
    """A suite, and its checks by name in the order of the report card."""

    suite: type[CheckSuite]
    checks: Mapping[str, Callable[[Any], str]]


SUITES = (
    SuiteEntry(AlgorithmSuite, algorithm_checks.CHECKS),
    SuiteEntry(TrainEngineSuite, train_engine_checks.CHECKS),
    SuiteEntry(RolloutEngineSuite, rollout_engine_checks.CHECKS),
    SuiteEntry(EnvironmentSuite, environment_checks.CHECKS),
)


def find_suite(target: str, plugins: Sequence[str] = ()) -> tuple[SuiteEntry, str]:
    """Return the suite of `target`, which is NAME or GROUP=NAME, and the plugin's name; GROUP is a config group.

    Raises PluginError for an unknown group or name, and for a bare name that plugins of two kinds have.
    """
    group, _, name = target.rpartition("=")
    groups = [entry.suite.group for entry in SUITES]
    if group and group not in groups:
        raise PluginError(f"no suite tests {group}={name}.{did_you_mean(group, groups)} Groups: {', '.join(groups)}")
    manager = PluginManager.load(plugins)
    asked = [entry for entry in SUITES if group in ("", entry.suite.group)]
    named = [entry for entry in asked if name in entry.suite.names(manager)]
    if len(named) == 1:
        return named[0], name
    if named:
        choices = " or ".join(f"{entry.suite.group}={name} (the {entry.suite.noun})" for entry in named)
        raise PluginError(f"{name!r} is the name of several plugins; write {choices}")
    known = {entry.suite.noun: entry.suite.names(manager) for entry in asked}
    nearest = did_you_mean(name, [other for names in known.values() for other in names])
    listed = "; ".join(f"{noun}: {', '.join(names) or 'none'}" for noun, names in known.items())
    raise PluginError(
        f"no {' or '.join(known)} is called {name!r}.{nearest} Installed: {listed}. Install its distribution "
        "(rlcore-plugin-...) or give its file with -p FILE.py"
    )


def open_suite(
    target: str,
    folder: Path,
    *,
    settings: Sequence[str] = (),
    plugins: Sequence[str] = (),
    only: str | None = None,
    script: Callable[..., Any] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> CheckSuite:
    """Return the suite over a plugin, a context manager that writes into `folder`; see `find_suite` for `target`.

    only: the name of the one check that will run; all by default. script, rows: see `conformance`. Raises PluginError
    as `find_suite` does, and for a script or rows of a plugin that is not an environment.
    """
    entry, name = find_suite(target, plugins)
    checks = entry.checks if only is None else {only: entry.checks[only]}
    own: dict[str, Any] = {}
    if script is not None or rows:
        if entry.suite is not EnvironmentSuite:
            raise PluginError(f"script and rows are for environments; {name!r} is a plugin of kind {entry.suite.noun}")
        own = {"script": script, "rows": rows}
    return entry.suite(name, folder, checks, settings=settings, plugins=plugins, **own)
