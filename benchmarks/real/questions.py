"""One-step word questions in the form of GSM8K: `python -m benchmarks.real.questions FOLDER` writes the data set."""

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
LARGEST = 10
"""The largest of the numbers that are added, and of those that are taken away or left."""
HELD_OUT_SHARE = 0.15
"""The share of the pairs of numbers that no training question has."""
TRAIN_ROWS, TEST_ROWS = 4096, 256


def pairs() -> list[tuple[str, int, int]]:
    """Return all sums: `+` or `-`, and its two numbers. The result is at least 1."""
    numbers = range(1, LARGEST + 1)
    added = [("+", a, b) for a in numbers for b in numbers]
    taken = [("-", left + b, b) for left in numbers for b in numbers]
    return added + taken


def questions(sums: Sequence[tuple[str, int, int]], rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield questions about these sums without end, each once; the answer is written as GSM8K writes it."""
    seen = set()
    while True:
        sign, a, b = rng.choice(sums)
        name, other = rng.sample(NAMES, 2)
        template = rng.choice(ADD if sign == "+" else SUBTRACT)
        question = template.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": f"#### {a + b if sign == '+' else a - b}"}


def write(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl and test.jsonl. No sum of the one is in the other, so an answer cannot be remembered."""
    rng = random.Random(seed)
    sums = pairs()
    rng.shuffle(sums)
    held_out = round(len(sums) * HELD_OUT_SHARE)
    folder.mkdir(parents=True, exist_ok=True)
    for split, part, rows in (("test", sums[:held_out], TEST_ROWS), ("train", sums[held_out:], TRAIN_ROWS)):
        rendered = questions(part, rng)
        lines = [json.dumps(next(rendered)) for _ in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
