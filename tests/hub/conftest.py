"""Models on the hub of these tests, and a run that stops."""

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


class StoppingAfterOne(PluginManager):
    """Stops a run at the end of its first step."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        raise RuntimeError("stop here")


@pytest.fixture
def stopping() -> type[PluginManager]:
    """The manager whose plugins stop a run after its first step."""
    return StoppingAfterOne
