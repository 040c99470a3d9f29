"""Tokenizers with the chat templates of model families, written for these tests (templates/)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.config.schema import ModelConfig
from rlcore.data.chat import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin|>", "<|python_tag|>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def family_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer with a family's special tokens and template; `tiny`: as it is shipped."""
    tokenizer = load_tokenizer(ModelConfig())
    if name == "tiny":
        return tokenizer
    if name == "mistral":
        tokenizer = metaspace_tokenizer()
    else:
        special = SPECIAL.get(name, SPECIAL["chatml"])
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.eos_token = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
        tokenizer.bos_token = "<|begin|>" if name == "llama3" else None
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


def metaspace_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer that, like Mistral's, writes a space before the start of a text, and drops it when decoding."""
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = decoders.Metaspace(prepend_scheme="first")
    characters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    special = ["<unk>", *SPECIAL["mistral"]]
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=characters, vocab_size=200, show_progress=False
    )
    model.train_from_iterator(
        ["What is one plus two? And plus three? Let me add: result one, two. 3 3 6 6\n\n"] * 5, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    return family_tokenizer


@pytest.fixture
def add_schema() -> dict[str, Any]:
    return ADD
