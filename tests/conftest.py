"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests of the session: an executor that finds this process connected uses it as it is."""
    from rlcore.config.schema import ClusterConfig
    from rlcore.workers import make_executor

    with make_executor(ClusterConfig(executor="ray")):
        yield


@pytest.fixture(scope="session")
def engine_models() -> ModuleType:
    """The module tests/engine_models.py, imported only by tests that use it: it needs torch."""
    spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).with_name("engine_models.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def model_folder(engine_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns the folder of a small random model of an architecture."""
    made: dict[str, Path] = {}

    def folder(kind: str = "qwen2") -> Path:
        if kind not in made:
            made[kind] = engine_models.make_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def write_random(engine_models: ModuleType) -> Callable[..., Path]:
    """See engine_models."""
    return engine_models.write_random


@pytest.fixture(scope="session")
def random_batch(engine_models: ModuleType) -> Callable[..., Any]:
    """See engine_models."""
    return engine_models.random_batch


@pytest.fixture
def make_engine(engine_models: ModuleType, model_folder: Callable[..., Path]) -> Callable[..., Any]:
    """A function that creates a torch engine of an architecture; see engine_models.torch_engine."""
    return lambda kind="qwen2", **options: engine_models.torch_engine(model_folder(kind), **options)


@pytest.fixture
def gradients(engine_models: ModuleType) -> Callable[..., Any]:
    """See engine_models."""
    return engine_models.gradients


@pytest.fixture
def assert_close(engine_models: ModuleType) -> Callable[..., None]:
    """See engine_models."""
    return engine_models.assert_close


def pytest_configure(config: pytest.Config) -> None:
    # `auto` would take a GPU, and numbers are compared with those of a CPU.
    if not any("gpu" in argument and "not gpu" not in argument for argument in config.invocation_params.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A shell's background job ignores Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the venv with TRL that tests/crosscheck compares with."""
    parser.addoption("--trl", metavar="VENV", default=None, help="a venv with TRL; see make crosscheck")
