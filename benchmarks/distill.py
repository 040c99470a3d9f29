"""Does a student come back to its teacher? A trained model, weights perturbed, and on-policy distillation alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.learning import SEEDS, Run, train
from benchmarks.report import GRPO, Benchmark, Figure, at_least, at_most

NOISE = 0.3
"""Standard deviation of the noise on each matrix, as a share of the matrix's own standard deviation."""
WORDS = ("algo=on_policy_distill", "algo.group_size=16", "trainer.total_steps=400")
BEFORE = at_most("accuracy of the perturbed student, worst seed", 0.4)
AFTER = at_least("accuracy after distillation, worst seed", 0.9)
SECONDS = at_most("whole command, slowest seed (s)", 300)
BENCHMARK = Benchmark(
    "distill",
    measures=(
        *GRPO,
        "plugins/rlcore-plugin-on-policy-distill/rlcore_plugin_on_policy_distill.py",
        "benchmarks/distill.py",
        "benchmarks/learning.py",
    ),
    bars=(BEFORE, AFTER, SECONDS),
)


def perturb(teacher: Path, student: Path, seed: int) -> None:
    """Write `student`, the teacher's model with noise on its matrices."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data += NOISE * parameter.data.std() * torch.randn_like(parameter)
    model.save_pretrained(student)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(student)


def main() -> bool:
    """Train a teacher, distil three perturbed students, and write the results."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "teacher"
        teacher = train("quickstart", 0, folder)
        (model,) = (folder / "checkpoints").glob(f"step_*{teacher['steps']:.0f}/actor/model")
        for seed in SEEDS:
            student = Path(place) / f"student-{seed}"
            perturb(model, student, seed)
            given = (f"model.path={student}", f"algo.teacher={model}")
            runs.append(train("quickstart", seed, Path(place) / f"run-{seed}", *WORDS, *given))
            steps = (Path(place) / f"run-{seed}" / "metrics.jsonl").read_text().splitlines()
            assert not any("reward/mean" in json.loads(step) for step in steps), "a reward was computed"
    before, after, seconds = (
        [run[key] for run in runs] for key in ("accuracy_before", "accuracy_after", "wall_seconds")
    )
    figures = [
        Figure("teacher", "held-out accuracy", "share of samples", [teacher["accuracy_after"]]),
        Figure("student", "held-out accuracy before", "share of samples", before),
        Figure("student", "held-out accuracy after", "share of samples", after),
        Figure("student", "whole command", "s", seconds),
    ]
    bars = [BEFORE.at(max(before)), AFTER.at(min(after)), SECONDS.at(max(seconds))]
    notes = (
        "The teacher is the tiny model after the quickstart. Each student is the teacher with Gaussian noise on its "
        f"matrices, {NOISE:g} of each matrix's standard deviation. It learns from the teacher's log-probs of its own "
        "samples only; no reward is computed in training."
    )
    return BENCHMARK.write(figures, bars, notes)
