"""Where a model's folder is, and what is read of it."""

from pathlib import Path

import pytest
import torch

from rlcore.assets import TINY
from rlcore.config import ModelConfig
from rlcore.model_folder import load_model_config, model_dtype, model_path, read_tokenizer


def test_model_path():
    assert model_path("tiny") == TINY
    assert model_path("/models/x") == Path("/models/x")
    assert model_path("~/x") == Path.home() / "x"


def test_precisions():
    assert model_dtype(ModelConfig()) is torch.float32
    assert model_dtype(ModelConfig(dtype="bf16")) is torch.bfloat16


def test_config_and_tokenizer_of_the_shipped_model():
    config = load_model_config("tiny", False)
    assert config.model_type == "qwen2"
    assert load_model_config("tiny", False) is config
    assert read_tokenizer(ModelConfig()).decode(read_tokenizer(ModelConfig())("1+1=")["input_ids"]) == "1+1="


def test_a_folder_that_is_not_there_is_not_downloaded(tmp_path):
    with pytest.raises((OSError, ValueError)):
        load_model_config(str(tmp_path / "absent"), False)
