"""Models for benchmarks: random weights of a given shape, with the tiny model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

from rlcore.assets import TINY


def write_llama(folder: Path) -> list[torch.Size]:
    """Write a Llama of 8 layers, hidden 512, in fp32 (128 MiB); return the shapes of its parameters."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for file in TINY.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    return [parameter.shape for parameter in model.parameters()]
