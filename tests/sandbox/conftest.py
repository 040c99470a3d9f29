"""Each mechanism of this machine; a test of one that it refuses is skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.isolation import MECHANISMS, Isolation, probe


@pytest.fixture(scope="session")
def isolations() -> dict[str, Isolation | str]:
    found: dict[str, Isolation | str] = {}
    for mechanism in MECHANISMS:
        try:
            found[mechanism] = probe(mechanism)
        except SandboxError as error:
            found[mechanism] = str(error)
    return found


@pytest.fixture(params=MECHANISMS)
def within(request, isolations) -> Isolation:
    found = isolations[request.param]
    if isinstance(found, str):
        pytest.skip(f"{request.param}: {found}")
    return found


@pytest.fixture
def held(within):
    """Skip a test of a guard that this machine cannot enforce, which `isolation().lines()` says."""

    def check(name: str) -> None:
        guard = getattr(within, name)
        if not guard.held:
            pytest.skip(f"{within.mechanism}: {guard}")

    return check


@pytest.fixture(scope="session")
def named() -> Callable[[str], list[int]]:
    def find(text: str) -> list[int]:
        """Return the processes that have the text as an argument."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if text in path.read_bytes().decode(errors="replace").split("\0"):
                    found.append(int(path.parent.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    return find
