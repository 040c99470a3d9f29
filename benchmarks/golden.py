"""`python -m benchmarks.golden FOLDER [NAME...]`: ten steps of each algorithm, to compare two trees bit for bit.

Run it in the tree before a change and in the tree after it, each with a folder of its own, on the same machine. Then
`python -m benchmarks.golden FOLDER --against OTHER` compares the metrics, without times, and the samples. The numbers
themselves depend on the machine's kernels, so none are stored.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMON = [
    "tracker=none",
    "trainer.total_steps=10",
    "trainer.eval_every=5",
    "data.eval_size=32",
    "data.batch_size=8",
    "trainer.samples_per_step=4",
    "engine.lr=3e-4",
    "rollout.response_len=12",
    "data.prompt_len=64",
    "cluster=in_process",
]
RUNS = {
    "grpo": "algo=grpo",
    "ppo": "algo=ppo",
    "online_dpo": "algo=online_dpo",
    "rejection_sampling": "algo=rejection_sampling",
    "rloo": "algo=rloo",
    "remax": "algo=remax",
    "dapo": "algo=dapo",
    "sft": "algo=sft",
    **{name: f"algo={name} algo.mini_batches=2" for name in ("gspo", "cispo", "sapo", "gmpo", "vespo", "dppo")},
    **{name: f"algo={name}" for name in ("maxrl", "reinforce_pp", "pass_at_k", "gdpo")},
    "safe_rlhf": 'algo=safe_rlhf reward.functions={{arithmetic:1,{cost}:0}} algo.cost_function="{cost}"',
    "reward_model": "algo=reward_model data=file data.path={pairs} reward.functions={{}}",
    "grpo_ray": "algo=grpo cluster=local",
    "grpo_ray_shard": "algo=grpo cluster=local engine.torch.shard=1 engine.clip_grad=0.1",
    "grpo_micro": "algo=grpo engine.micro_batch_tokens=200 engine.torch.padding_free=false "
    "engine.torch.activation_checkpointing=true",
    "grpo_tp": "algo=grpo cluster=local engine.tp=2",
    "ppo_ray": "algo=ppo cluster=local engine.pp=2",
    "grpo_topp": 'algo=grpo rollout.top_p=0.9 rollout.top_k=20 rollout.min_tokens=2 rollout.stop=["7"]',
}
"""Overrides by name: every algorithm in process, and GRPO and PPO with several ranks, layouts and samplings."""
CLOCK = ("time/", "timeline/", "throughput/")
COST = "def cost(prompt, response, answer, **columns):\n    return len(response) * 0.1 - 0.3\n"


def write_files(folder: Path) -> dict[str, str]:
    """Write what safe_rlhf and reward_model read; return the names for RUNS."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cost.py").write_text(COST)
    pairs = [
        {"prompt": f"{a}+{a + 3}=", "answer": str(2 * a + 3), "chosen": str(2 * a + 3), "rejected": str(2 * a + 5)}
        for a in range(64)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {"cost": f"{folder / 'cost.py'}\\:cost", "pairs": str(folder / "pairs.jsonl")}


def train(folder: Path, names: Sequence[str]) -> None:
    """Train each run into a folder of its name. Raises CalledProcessError for one that fails."""
    files = write_files(folder)
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    for name in names:
        words = [word.format(**files) for word in RUNS[name].split()]
        # The key's own text keeps the colon; only within a mapping must it be escaped.
        words = [word.replace("\\:", ":") if word.startswith("algo.") else word for word in words]
        print(name, flush=True)
        command = [sys.executable, "-m", "rlcore.cli", "train", *COMMON, *words, f"run.dir={folder / name}"]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


def metrics(run: Path) -> list[Mapping[str, float]]:
    """Return the metrics of each step, without those of the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in rows]


def samples(run: Path) -> list[str]:
    """Return the lines of all files of samples."""
    return [line for file in sorted((run / "samples").glob("*.jsonl")) for line in file.read_text().splitlines()]


def differences(run: Path, other: Path) -> list[str]:
    """Return a line for each metric that differs, and one for the samples."""
    here, there = metrics(run), metrics(other)
    found = [] if len(here) == len(there) else [f"{len(here)} rows of metrics, {len(there)} in the other"]
    for step, (row, known) in enumerate(zip(here, there, strict=False)):
        for key in sorted({*row, *known}):
            if row.get(key) != known.get(key):
                found.append(f"row {step}: {key} is {row.get(key)}, was {known.get(key)}")
    if samples(run) != samples(other):
        found.append("the samples differ")
    return found


def main(argv: Sequence[str]) -> int:
    """Train, or compare; the exit status is 1 when something differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--against", type=Path, help="compare with this folder and train nothing")
    options = parser.parse_args(argv)
    names = options.names or list(RUNS)
    if options.against is None:
        train(options.folder.resolve(), names)
        return 0
    different = False
    for name in names:
        found = differences(options.folder / name, options.against / name)
        print(f"{name}: {found[0] + f' ({len(found)} in all)' if found else 'equal'}")
        different |= bool(found)
    return int(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
