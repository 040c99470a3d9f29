"""A model folder to break, and the shipped tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlcore.assets import TINY
from rlcore.config.schema import ModelConfig
from rlcore.data.chat import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EditJson = Callable[..., None]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """The tiny model's small files, as a Llama's, since the tokenizer class of a Qwen2 adds tokens of its own."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    (folder / "model.safetensors").write_bytes(b"")
    edit_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    return folder


@pytest.fixture(name="edit_json")
def edit_json_fixture() -> EditJson:
    return edit_json


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None takes the key out."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
