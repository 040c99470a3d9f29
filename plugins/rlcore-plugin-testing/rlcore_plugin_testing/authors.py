"""The function for plugin authors. It loads nothing heavy before a test module calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def conformance(target: str, *settings: str, plugins: Sequence[str] = ()) -> Callable[..., None]:
    """Return a test of an installed plugin, parametrised with the name of each check of its suite.

    `target` is NAME, or GROUP=NAME (with a config group) where plugins of two kinds share a name. `settings` are
    overrides that the plugin needs, such as "algo.group_size=4"; `plugins` are local files, as for `-p`. A check that
    does not apply is skipped with its reason. The checks share their runs, so all of one plugin should run in one
    process.
    """
    import pytest

    from rlcore_plugin_testing.suites import find_suite

    entry, name = find_suite(target, plugins)

    @pytest.mark.parametrize("check", list(entry.checks))
    def test(check: str, rlcore_suites: Any) -> None:
        result = rlcore_suites(f"{entry.suite.group}={name}", settings, plugins).result(check)
        if result.outcome == "n/a":
            pytest.skip(result.text)
        if result.outcome == "FAIL":
            pytest.fail(f"{name}: {result.text}", pytrace=False)

    return test
