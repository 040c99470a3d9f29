"""Models on the hub of these tests."""

from collections.abc import Callable

import pytest

from rlcore.assets import TINY
from rlcore.config import Config, compose
from rlcore.plugins import PluginManager


@pytest.fixture
def tiny(hub_server) -> dict[str, bytes]:
    """The files of the shipped model."""
    return hub_server.files_of(TINY)


@pytest.fixture
def composed() -> Callable[..., Config]:
    """Compose the config of these overrides, as a command does."""
    return lambda *overrides: compose(["algo=grpo", "cluster=in_process", *overrides], PluginManager.load())
