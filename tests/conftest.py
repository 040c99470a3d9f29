"""Fixtures for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests of the session: an executor that finds this process connected uses it as it is."""
    from rlcore.config.schema import ClusterConfig
    from rlcore.workers import make_executor

    with make_executor(ClusterConfig(executor="ray")):
        yield


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the venv with TRL that tests/crosscheck compares with."""
    parser.addoption("--trl", metavar="VENV", default=None, help="a venv with TRL; see make crosscheck")
