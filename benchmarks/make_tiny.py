"""Make the tiny model: `python -m benchmarks.make_tiny --out DIR`.

A 1 M parameter Qwen2 that imitates noisy demonstrations of the training problems of `rlcore.data.arithmetic`. The
demonstrator knows the right answer but may slip at each digit and write a random one; a fixed share of the answers is
right. So the model's most likely answer is the right one, and at temperature 1 it gives that answer about a third of
the time, on held-out problems too. This leaves room for reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlcore.assets import TINY
from rlcore.data.arithmetic import Problem, problems

RIGHT_SHARE = 0.32
"""Share of the demonstrations whose answer is right."""

IGNORED = -1
"""Target of positions that the loss ignores."""

PAD, END, UNKNOWN, ROLES = "<|pad|>", "<|end|>", "<|unknown|>", ("system", "user", "assistant")
VOCAB_SIZE = 320
"""The 256 bytes and the special tokens, filled up to a multiple of 64, which inference kernels like."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: a token per ASCII character, one per byte of other text, and the chat template's markers.

    It is byte-level without merges, not a table of characters, because transformers 5 opens every Qwen2 model's
    tokenizer as a byte-level one, ignoring the class that its files name.
    """
    special = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special += [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(special) - len(characters))]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return the model with fresh weights: few wide layers, since a small model's run time grows with its layers."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def slip_probability(length: int, right_share: float) -> float:
    """Return the probability of a slip at each of `length` digits with which `right_share` of the answers are right.

    A slip draws one of ten digits and hits the right one once in ten: (1 - 0.9 * slip) ** length = right_share.
    """
    return (1 - right_share ** (1 / length)) / 0.9


def demonstration(right: str, right_share: float, rng: random.Random) -> str:
    """Return a demonstrated answer: the right one, each digit replaced by a random one at a slip."""
    slip = slip_probability(len(right), right_share)
    return "".join(rng.choice("0123456789") if rng.random() < slip else digit for digit in right)


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    right_share: float,
    rng: random.Random,
) -> float:
    """Train on demonstrations of random training problems and return the last batch's loss, in nats per token.

    The loss covers the answer and its end token. Its targets are the demonstrator's token distributions, not the drawn
    tokens: the same expected gradient with far less noise, so that minutes on a CPU suffice.
    """
    pool = problems("train")
    digit_ids = tokenizer.convert_tokens_to_ids(list("0123456789"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    model.train()
    started, running = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        rows: list[list[int]] = []
        targets: list[list[int]] = []
        slips: list[list[float]] = []
        for problem in rng.choices(pool, k=batch_size):
            prompt, right = prompt_ids(tokenizer, problem), str(problem.result)
            before = len(prompt) - 1
            rows.append([*prompt, *(digit_ids[int(d)] for d in demonstration(right, right_share, rng))])
            targets.append([IGNORED] * before + [*(digit_ids[int(d)] for d in right), tokenizer.eos_token_id])
            slips.append([0.0] * before + [slip_probability(len(right), right_share)] * len(right) + [0.0])
        # Padding is on the right and attention is causal, so no real token attends to it.
        log_probs = model(_padded(rows, tokenizer.pad_token_id)).logits.log_softmax(-1)
        target, slip = _padded(targets, IGNORED), _padded(slips, 0.0)
        of_right = log_probs.gather(2, target.clamp(min=0)[..., None])[..., 0]
        of_any = log_probs[..., digit_ids].mean(-1)
        loss = -((1 - slip) * of_right + slip * of_any)[target != IGNORED].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running += loss.item()
        if step % 100 == 0:
            print(f"  step {step:5d}  loss {running / 100:.4f}  {time.perf_counter() - started:5.0f} s", flush=True)
            running = 0.0
    return loss.item()


def _padded(rows: Sequence[Sequence[float]], value: float) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Return the token ids of the problem as a chat, up to the assistant's answer."""
    messages = [{"role": "user", "content": problem.prompt}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(chat, add_special_tokens=False)


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: list[Problem],
    *,
    temperature: float,
    seed: int = 0,
    new_tokens: int = 8,
) -> float:
    """Return the share of `pool` answered exactly; `temperature` 0 is greedy. Prompts of equal length form a batch."""
    generator = torch.Generator().manual_seed(seed)
    groups: dict[int, list[tuple[Problem, list[int]]]] = {}
    for problem in pool:
        prompt = prompt_ids(tokenizer, problem)
        groups.setdefault(len(prompt), []).append((problem, prompt))
    model.eval()
    right = 0
    for length, group in groups.items():
        ids = torch.tensor([row for _, row in group])
        for _ in range(new_tokens):
            logits = model(ids).logits[:, -1]
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, chosen], dim=1)
        for (problem, _), row in zip(group, ids.tolist(), strict=True):
            response = row[length:]
            finished = response[: response.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in response else []
            right += tokenizer.decode(finished) == str(problem.result)
    return right / len(pool)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder that `AutoModelForCausalLM` and `AutoTokenizer` open."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes a class name that older releases, which inference engines pin, cannot load.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Make the model, write it to a folder and print its accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TINY, help="folder to write (default: the shipped model's)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    # The second round, at a lower rate, makes the arithmetic stable enough for reinforcement learning.
    for steps, lr, order in ((1600, 2e-3, arguments.seed), (600, 1e-3, f"{arguments.seed} second round")):
        train(model, tokenizer, steps=steps, batch_size=128, lr=lr, right_share=RIGHT_SHARE, rng=random.Random(order))
    held_out = problems("eval")
    print(f"{len(held_out)} held-out problems, greedy: {accuracy(model, tokenizer, held_out, temperature=0):.3f}")
    for seed in range(5):
        sampled = accuracy(model, tokenizer, held_out[:256], temperature=1, seed=seed)
        print(f"the first 256 of them, sampled with seed {seed}: {sampled:.3f}")
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
