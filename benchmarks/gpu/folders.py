"""Models of random weights, their tokenizer, and the data: all that the parts read, made without a network."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.gpu.sizes import Shape, Size
from benchmarks.make_tiny import CHAT_TEMPLATE, END, PAD, ROLES, UNKNOWN

NAMES = ("Ana", "Bela", "Chidi", "Dara", "Emre", "Femi", "Gita", "Hugo", "Ines", "Jonas")
THINGS = ("apples", "marbles", "stamps", "pencils", "tickets", "eggs", "books", "candles")
MERGED = 600
"""Tokens that the tokenizer learns from the data; the rest of a vocabulary is filled up."""
REWARD = '''"""The share of capital letters: a number that differs from sample to sample."""


def score(prompt, response, answer):
    return sum(character.isupper() for character in response) / max(len(response), 1)
'''


def write_folders(folder: Path, size: Size) -> None:
    """Write data, reward and the models `half`, `larger` and `tail`, which is `half` with many end tokens."""
    write_data(folder / "data")
    (folder / "reward.py").write_text(REWARD)
    write_model(folder / "half", size.half, folder / "data", size.device)
    write_model(folder / "larger", size.larger, folder / "data", size.device)
    tail = folder / "tail"
    tail.mkdir()
    for file in (folder / "half").iterdir():
        if file.suffix == ".safetensors":
            (tail / file.name).symlink_to(file)
        else:
            shutil.copy(file, tail / file.name)
    # The model's tokens are nearly equally likely, so a response ends after a geometric number of tokens.
    vocabulary = size.half.vocabulary
    ends = list(range(vocabulary - vocabulary // size.tail_mean, vocabulary))
    transformers.GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(tail)


def write_data(folder: Path) -> None:
    """Write word problems of a length like GSM8K's: 512 to train on, 16 held out."""
    folder.mkdir()
    numbers = random.Random(0)
    for split, count in (("train", 512), ("test", 16)):
        rows = [_problem(numbers, i, split) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _problem(numbers: random.Random, index: int, split: str) -> dict[str, str]:
    total = numbers.randint(10, 99)
    sentences = [f"In {split} round {index}, {numbers.choice(NAMES)} begins with {total} {numbers.choice(THINGS)}."]
    for _ in range(numbers.randint(2, 8)):
        more = numbers.randint(2, 40)
        total += more
        sentences.append(f"Then {numbers.choice(NAMES)} brings {more} {numbers.choice(THINGS)} from the market.")
    sentences.append("How many things are there in all at the end of the day?")
    return {"prompt": " ".join(sentences), "answer": f"There are {total} things in all. " * 8}


def write_model(folder: Path, shape: Shape, data: Path, device: str) -> None:
    """Write a model in bf16 whose weights are drawn on `device`, and a tokenizer made from the data."""
    tokenizer = make_tokenizer(data, shape.vocabulary)
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)


def make_tokenizer(data: Path, vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that has learnt from the prompts, filled up to `vocabulary` tokens."""
    special = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [json.loads(line)["prompt"] for line in (data / "train.jsonl").read_text().splitlines()]
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    state = json.loads(core.to_str())
    known = state["model"]["vocab"]
    known.update({f"filler{i}": i for i in range(len(known), vocabulary)})
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
    )
