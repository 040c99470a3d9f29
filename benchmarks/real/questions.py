"""One-step word questions like GSM8K's, each after two solved ones: `python -m benchmarks.real.questions FOLDER`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Henry", "Ivy", "Jack", "Lucy", "Max", "Nora", "Tom")
THINGS = ("apples", "books", "cards", "coins", "cookies", "flowers", "marbles", "pencils", "shells", "stamps")
ADD = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
)
SUBTRACT = (
    "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have left?",
    "{name} has {a} {things} and loses {b} of them. How many {things} are left?",
    "There are {a} {things} on a table. {name} takes {b} of them. How many {things} are still there?",
)
SYSTEM = "Answer as shown."
"""Short, as every token of a prompt is computed; without it the chat template writes a longer one."""
SOLVED = (
    ("Sam has 2 pens and buys 3 more. How many pens does Sam have now?", "2 + 3 = 5\n#### 5"),
    ("Mia has 9 cups and breaks 5 of them. How many cups are left?", "9 - 5 = 4\n#### 4"),
)
"""The questions and answers that come before each question, as turns of the conversation."""
LARGEST = 10
"""The largest number in a question; the largest answer is twice that."""
HELD_OUT_SHARE = 0.15
"""The share of the sums that no training question has."""
TRAIN_ROWS, TEST_ROWS = 4096, 256

Sum = tuple[str, int, int]
"""`+` or `-`, and the two numbers."""


def all_sums() -> list[Sum]:
    """Return all sums whose result is at least 1."""
    numbers = range(1, LARGEST + 1)
    added = [("+", a, b) for a in numbers for b in numbers]
    taken = [("-", a, b) for a in numbers for b in numbers if b < a]
    return added + taken


def questions(sums: Sequence[Sum], rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yield questions about these sums with their answers, without end and without repetition."""
    seen = set()
    while True:
        sign, a, b = rng.choice(sums)
        name, other = rng.sample(NAMES, 2)
        template = rng.choice(ADD if sign == "+" else SUBTRACT)
        question = template.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
        if question not in seen:
            seen.add(question)
            yield question, a + b if sign == "+" else a - b


def conversation(question: str) -> list[dict[str, str]]:
    """Return the messages of a prompt: the solved questions, then this one."""
    messages = [{"role": "system", "content": SYSTEM}]
    for solved, answer in SOLVED:
        messages += [{"role": "user", "content": solved}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": question}]


def write(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl and test.jsonl; no sum of the one is in the other, so no answer can be remembered."""
    rng = random.Random(seed)
    sums = all_sums()
    rng.shuffle(sums)
    held_out = round(len(sums) * HELD_OUT_SHARE)
    folder.mkdir(parents=True, exist_ok=True)
    for split, part, rows in (("test", sums[:held_out], TEST_ROWS), ("train", sums[held_out:], TRAIN_ROWS)):
        endless = questions(part, rng)
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(rows):
                question, answer = next(endless)
                file.write(json.dumps({"prompt": conversation(question), "answer": f"#### {answer}"}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
