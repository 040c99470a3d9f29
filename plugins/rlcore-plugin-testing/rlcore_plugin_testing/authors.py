"""The function for plugin authors. It loads nothing heavy before a test module calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def conformance(
    target: str,
    *settings: str,
    plugins: Sequence[str] = (),
    script: Callable[[Mapping[str, Any], int], Any] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Callable[..., None]:
    """Return a test of an installed plugin, parametrised with the name of each check of its suite.

    `target` is NAME, or GROUP=NAME (with a config group) where plugins of two kinds share a name. `settings` are
    overrides that the plugin needs, such as "algo.group_size=4"; `plugins` are local files, as for `-p`. A check that
    does not apply is skipped with its reason. The checks share their runs, so all of one plugin should run in one
    process.

    For an environment: `rows` are the data rows of its episodes, each with a column `prompt`, in place of those of the
    settings' data set. `script(row, turn)` returns the policy's turn number `turn` (from 0): a text, a tool call
    {"name": NAME, "arguments": {...}}, or a list of calls. By default it calls every tool once, with arguments that
    fit its schema, then writes a broken call and a call of an unknown tool, and at last answers with a number.
    """
    import pytest

    from rlcore_plugin_testing.suites import find_suite

    entry, name = find_suite(target, plugins)

    @pytest.mark.parametrize("check", list(entry.checks))
    def test(check: str, rlcore_suites: Any) -> None:
        result = rlcore_suites(f"{entry.suite.group}={name}", settings, plugins, script, rows).result(check)
        if result.outcome == "n/a":
            pytest.skip(result.text)
        if result.outcome == "FAIL":
            pytest.fail(f"{name}: {result.text}", pytrace=False)

    return test
