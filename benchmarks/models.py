"""Models for benchmarks: random weights of a given shape, with the tiny model's tokenizer.

What takes seconds to import is imported by the functions: every benchmark imports this, also to say what it declares.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.assets import TINY

if TYPE_CHECKING:
    import torch


def write_llama(folder: Path) -> list[torch.Size]:
    """Write a Llama of 8 layers, hidden 512, in fp32 (128 MiB); return the shapes of its parameters."""
    import transformers

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


def write_characters(folder: Path, *, hidden: int = 256, layers: int = 8, kv_heads: int = 2) -> list[str]:
    """Write a random Qwen2 of 8 heads with 80 tokens, of which 74 are characters; return those."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from benchmarks.make_tiny import CHAT_TEMPLATE, END, PAD, ROLES, UNKNOWN

    special = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    characters = [chr(code) for code in range(33, 127)][: 80 - len(special)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *characters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=80,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return characters
