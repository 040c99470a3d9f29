"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def engine_models() -> ModuleType:
    """The module tests/engine_models.py, imported only by tests that use it: it needs torch."""
    return _module("engine_models")


@pytest.fixture(scope="session")
def hub_server() -> ModuleType:
    """The module tests/hub_server.py."""
    return _module("hub_server")


@pytest.fixture(scope="session")
def written_calls() -> ModuleType:
    """The module tests/written_calls.py."""
    return _module("written_calls")


def _module(name: str) -> ModuleType:
    """Import a program that lies beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(hub_server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub on loopback (see tests/hub_server.py), which this process and its children use, and an empty cache."""
    from huggingface_hub import constants

    served = hub_server.Hub()
    cache = tmp_path / "huggingface" / "hub"
    settings = {"ENDPOINT": served.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    children = {
        "HF_ENDPOINT": served.url,
        "HF_HOME": str(cache.parent),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    for name, value in {
        **children,
        "HF_HUB_CACHE": str(cache),
        "NO_PROXY": "127.0.0.1",
        "HF_TOKEN": "hf_secret",
    }.items():
        monkeypatch.setenv(name, value)
    yield served
    served.close()


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
