"""Does the tiny model learn in environments? The guessing game, and a task of reasoning-gym, with three seeds each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import GRPO, Bar, Benchmark, Figure, at_least, at_most

SEEDS = (0, 1, 2)
BEFORE = at_most("guess: accuracy before, worst seed", 0.3)
AFTER = at_least("guess: accuracy after, worst seed", 0.9)
SECONDS = at_most("guess: whole command, slowest (s)", 600)
GAIN = at_least("reasoning-gym: gain of accuracy, worst seed", 0.1)
SEVERAL = at_least("tokens/s of several turns, of one turn", 0.85)
DECODING = at_least("share of the time that decodes, answers after 200 ms", 0.80)
BENCHMARK = Benchmark(
    "episodes",
    measures=(
        *GRPO,
        "rlcore/episodes",
        "plugins/rlcore-plugin-reasoning-gym/rlcore_plugin_reasoning_gym",
        "benchmarks/episodes",
    ),
    bars=(BEFORE, AFTER, SECONDS, GAIN, SEVERAL, DECODING),
)

GUESS = (
    "-p",
    str(Path(__file__).with_name("guess.py")),
    "experiment=quickstart",
    "data=guess",
    "env=guess",
    "env.turn_len=4",
    "rollout.response_len=32",
    "algo.group_size=16",
    "algo.kl_coef=0",
    "data.batch_size=8",
    "data.eval_size=240",
    "trainer.total_steps=600",
    "trainer.eval_every=600",
)
"""The guessing game of guess.py: `rlcore train` with these words."""

DIVISORS = (
    "experiment=quickstart",
    "data=reasoning_gym",
    "data.reasoning_gym.tasks={gcd: 1.0}",
    "data.reasoning_gym.options={gcd: {max_value: 99}}",
    "data.reasoning_gym.eval_size=256",
    "data.prompt_len=160",
    "rollout.response_len=4",
    "rollout.min_tokens=1",
    "algo.group_size=16",
    "algo.kl_coef=0",
    "data.batch_size=8",
    "trainer.total_steps=100",
    "trainer.eval_every=100",
)
"""The greatest common divisor of two numbers up to 99, in reasoning-gym's words. Without `min_tokens` the tiny model
answers such long prompts with nothing, and no answer is ever right."""

Run = Mapping[str, float]


def train(words: Sequence[str], seed: int, folder: Path) -> dict[str, float]:
    """Train with a seed, in a process of its own; return the run's summary and the seconds of the whole command."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rlcore.cli", "train", *words, f"trainer.seed={seed}", f"run.dir={folder}"]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ})
    return {**json.loads((folder / "summary.json").read_text()), "wall_seconds": time.perf_counter() - start}


def figures(name: str, runs: Sequence[Run]) -> list[Figure]:
    """Return the measured quantities of one experiment."""
    measured = [
        ("accuracy_before", "held-out accuracy before", "share of episodes"),
        ("accuracy_after", "held-out accuracy after", "share of episodes"),
        ("wall_seconds", "whole command", "s"),
    ]
    return [Figure("rlcore", f"{name}: {label}", unit, [run[key] for run in runs]) for key, label, unit in measured]


def bars(guess: Sequence[Run], divisors: Sequence[Run]) -> list[Bar]:
    """Return the bars, each for the worst seed."""
    gains = [run["accuracy_after"] - run["accuracy_before"] for run in divisors]
    return [
        BEFORE.at(max(run["accuracy_before"] for run in guess)),
        AFTER.at(min(run["accuracy_after"] for run in guess)),
        SECONDS.at(max(run["wall_seconds"] for run in guess)),
        GAIN.at(min(gains)),
    ]


def main() -> bool:
    """Run both experiments with all seeds and write the results."""
    from benchmarks.episodes import throughput

    runs: dict[str, list[dict[str, float]]] = {"guess": [], "reasoning-gym": []}
    with tempfile.TemporaryDirectory() as place:
        for seed in SEEDS:
            for (name, done), words in zip(runs.items(), (GUESS, DIVISORS), strict=True):
                done.append(train(words, seed, Path(place) / f"{name}-{seed}"))
    notes = (
        "GRPO on the tiny model, seeds 0, 1 and 2, accuracy sampled at temperature 1. `guess`: a number from 10 to 99 "
        "in two guesses, where the answer tells the way from the first; held out are 12 numbers, 20 games each. "
        "`reasoning-gym`: gcd of two numbers up to 99, 256 held-out questions; most of the gain is the form of the "
        "answer and the frequent answers."
    )
    measured = [figure for name, done in runs.items() for figure in figures(name, done)]
    speed, several, decoding, how = throughput.measure()
    return BENCHMARK.write(
        [*measured, *speed],
        [*bars(*runs.values()), SEVERAL.at(several), DECODING.at(decoding)],
        f"{notes} Speed: {how}.",
    )
