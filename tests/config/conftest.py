from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.config import Config, compose
from rlcore.plugins import PluginManager, installed

STAND_IN = Path(__file__).parents[1] / "fixtures" / "plugins" / "stand_in.py"


@pytest.fixture(scope="session")
def plugins() -> PluginManager:
    """The stand-in for rlcore's own plugins: the same names, no torch."""
    return PluginManager.load([str(STAND_IN), *(f"no:{entry.name}" for entry in installed())])


@pytest.fixture(scope="session")
def make(plugins: PluginManager) -> Callable[..., Config]:
    """Compose a config of the algorithm `echo` from further overrides."""
    return lambda *overrides: compose(["algo=echo", "algo.target=you", *overrides], plugins)


@pytest.fixture(scope="session")
def config(make: Callable[..., Config]) -> Config:
    """A config of the algorithm `echo` with the defaults."""
    return make()
