"""Online DPO and PPO against TRL, on the quickstart's small steps and on responses with a long tail."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.against_trl import (
    HERE,
    OLD_TRL,
    PROGRAM,
    TRL,
    TWO_THREADS,
    Run,
    Side,
    alternate,
    figures,
    long_tails,
    rates,
    small_steps,
    throughputs,
)
from benchmarks.report import TRAINING, Benchmark, Figure, at_least

SMALL, LONG = "quickstart", "long tail"
UNITS = {SMALL: "steps", LONG: "tokens/s"}
BOUNDS = {SMALL: 1.5, LONG: 3.0}
BARS = {name: at_least(f"{name}: times TRL's {UNITS[name]}", bound) for name, bound in BOUNDS.items()}
ONLINE_DPO, PPO = (
    Benchmark(
        name,
        measures=(*TRAINING, f"algorithms/rlcore_{name}.py", *PROGRAM, "benchmarks/against_trl/others.py"),
        bars=tuple(BARS.values()),
    )
    for name in ("online_dpo", "ppo")
)
WORK = """\
Two workloads. quickstart: the shipped model, {small} prompts x {samples}, at most 16 new tokens, one thread on one
core, runs of 60 steps of which the first 10 do not count. long tail: a random Qwen2 of 8 layers, hidden 256, {long}
prompts x {samples}, at most 512 new tokens, two threads on two cores, runs of two steps of which the first does not
count. fp32, AdamW, one optimizer step a batch, a frozen reference on both sides, rlcore in process; the sides in turn.
"""
ONLINE_DPO_NOTES = (
    WORK.format(small=64, long=32, samples=2)
    + """\
The reward is a number made from the text, so that only equal responses tie. TRL: OnlineDPOTrainer samples inside each
micro-batch, of {micro} prompts on the long tail and of all on the quickstart, and trains on tied pairs too; rlcore
leaves those out (the figure says how many)."""
)
PPO_NOTES = (
    WORK.format(small=128, long=64, samples=1)
    + """\
Policy and critic start from the same weights. TRL 1.12 (the last with PPO; experimental) takes only models for
rewards: here one that calls the same function. It samples all rows at once, trains on micro-batches of {micro} rows on
the long tail and of all on the quickstart, does not clip the gradient, and has one optimizer for both models; rlcore
has two."""
)


def online_dpo() -> bool:
    """Measure online DPO and write the results."""
    return compare(ONLINE_DPO, TRL, samples=2, micro=16, notes=ONLINE_DPO_NOTES)


def ppo() -> bool:
    """Measure PPO and write the results."""
    return compare(PPO, OLD_TRL, samples=1, micro=16, notes=PPO_NOTES)


def compare(benchmark: Benchmark, peer: str, *, samples: int, micro: int, notes: str) -> bool:
    """Measure both workloads with as many rows a step as GRPO's have, and write the results."""
    algorithm = benchmark.name
    measured: list[Figure] = []
    bars = []
    for name, make in ((SMALL, small_steps), (LONG, long_tails)):
        with tempfile.TemporaryDirectory() as folder:
            work = make(Path(folder))
            prompts = work.prompts * work.samples // samples
            work = replace(work, algorithm=algorithm, prompts=prompts, samples=samples, reward=str(HERE / "texts.py"))
            cores, settings = (1, ("cluster=in_process",)) if name == SMALL else (2, TWO_THREADS)
            sides = [Side(f"{peer}, {name}", cores), Side(f"rlcore, {name}", cores, settings)]
            found = alternate(work, sides, rounds=5)
        theirs, ours = (found[side.name] for side in sides)
        measured += figures(found)
        if algorithm == "online_dpo":
            measured.append(Figure(sides[1].name, "tied pairs, left out", "share", [tied(run) for run in ours]))
        of = rates if name == SMALL else throughputs
        ratio = statistics.median(of(ours)) / statistics.median(of(theirs))
        bars.append(BARS[name].at(ratio))
    return benchmark.write(measured, bars, notes.format(micro=micro))


def tied(run: Run) -> float:
    """Return the share of pairs that were left out as ties."""
    ties, pairs = (sum(row[f"dpo/{name}"] for row in run.rows) for name in ("ties", "pairs"))
    return ties / (ties + pairs)
