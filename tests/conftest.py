"""Fixtures for all tests."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
"""The config of small random models."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests of the session: an executor that finds this process connected uses it as it is."""
    from rlcore.config.schema import ClusterConfig
    from rlcore.workers import make_executor

    with make_executor(ClusterConfig(executor="ray")):
        yield


def make_model(kind: str, folder: Path) -> Path:
    """Write a random model of an architecture with the tiny model's tokenizer files beside it."""
    import transformers

    configs = {
        "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
        "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
        "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False, "head_dim": 16}),
        "mistral-window": (transformers.MistralConfig, {"sliding_window": 4, "head_dim": 12}),
        "gpt2": (transformers.GPT2Config, {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
        "gemma2": (transformers.Gemma2Config, {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 12}),
    }
    return write_random(*configs[kind], folder)


def write_random(config: type, options: dict, folder: Path) -> Path:
    """Write a random model of a transformers config with the tiny model's tokenizer files beside it."""
    import torch
    import transformers

    from rlcore.assets import TINY

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**SIZES, **options}))
    model.save_pretrained(folder)
    for file in TINY.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(kind: str = "qwen2") -> Path:
        if kind not in made:
            made[kind] = make_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture(name="write_random", scope="session")
def write_random_fixture():
    return write_random


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the venv with TRL that tests/crosscheck compares with."""
    parser.addoption("--trl", metavar="VENV", default=None, help="a venv with TRL; see make crosscheck")
