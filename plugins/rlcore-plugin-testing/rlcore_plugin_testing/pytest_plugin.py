"""The pytest plugin `rlcore`: the fixture behind `conformance`. It imports nothing heavy until used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rlcore_plugin_testing.report import CheckSuite


@pytest.fixture(scope="session")
def rlcore_suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., CheckSuite]]:
    """Return a function that gives the suite of (target, settings, plugins); each is made once in a session."""
    from rlcore_plugin_testing.suites import open_suite

    made: dict[tuple[Any, ...], CheckSuite] = {}
    with ExitStack() as stack:

        def suite(
            target: str,
            settings: Sequence[str] = (),
            plugins: Sequence[str] = (),
            script: Callable[..., Any] | None = None,
            rows: Sequence[Mapping[str, Any]] = (),
        ) -> CheckSuite:
            key = (target, *settings, None, *plugins, script, repr(rows))
            if key not in made:
                folder = tmp_path_factory.mktemp(f"conformance-{target.replace('=', '-')}")
                made[key] = stack.enter_context(
                    open_suite(target, folder, settings=settings, plugins=plugins, script=script, rows=rows)
                )
            return made[key]

        yield suite
