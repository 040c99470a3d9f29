"""Against TRL on the same machine: GRPO on the quickstart's small steps, and on responses with a long tail."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import write_characters
from benchmarks.report import GRPO, Benchmark, Figure, at_least, at_most
from rlcore.assets import TINY
from rlcore.data.arithmetic import problems

HERE = Path(__file__).parent
PEER = HERE.parents[1] / ".venv-trl" / "bin" / "python"
TRL = "TRL 1.16.0"
OLD_TRL, OLD_PATH = "TRL 1.12.0", HERE.parents[1] / ".venv-trl" / "trl-1.12"
"""The last TRL with PPO, beside the other one in its venv."""
ALGORITHMS = {
    "grpo": ["algo.group_size={samples}", "algo.kl_coef=0"],
    "online_dpo": ["algo.group_size={samples}"],
    "ppo": ["algo.samples={samples}", "algo.kl_coef=0.01"],
}
"""rlcore's settings of each."""
GIB = 2**30


PROGRAM = ("benchmarks/against_trl/__init__.py", "benchmarks/against_trl/trl_side.py", "benchmarks/models.py")
IN_PROCESS = at_least("in process, one core: times TRL's steps", 1.3)
RAY = at_least("Ray, two workers, two cores: times TRL's steps", 1.7)
QUICKSTART = Benchmark("quickstart", measures=(*GRPO, *PROGRAM), bars=(IN_PROCESS, RAY))
SPEED, SPEED_BF16 = at_least("times TRL's tokens/s", 5.5), at_least("times TRL's tokens/s", 4)
MEMORY = at_most("peak memory, of TRL's", 0.5)
SECOND_WORKER = at_least("two workers on two cores, times one on one", 1.5)
LONG_TAIL = Benchmark("long_tail", measures=(*GRPO, *PROGRAM), bars=(SPEED, MEMORY, SECOND_WORKER))
LONG_TAIL_BF16 = Benchmark("long_tail_bf16", measures=(*GRPO, *PROGRAM), bars=(SPEED_BF16, MEMORY))


@dataclass(frozen=True)
class Work:
    """What both sides train: files, batch, lengths, and the steps of a run, of which the first `warm` do not count."""

    model: str
    data: str
    reward: str
    prompts: int
    response_len: int
    steps: int
    warm: int
    micro_batch: int | None = None
    """Rows of TRL's micro-batches; None for all at once."""
    samples: int = 8
    """Per prompt."""
    lr: float = 1e-4
    algorithm: str = "grpo"


@dataclass(frozen=True)
class Side:
    """Who trains, on which cores."""

    name: str
    cores: int
    settings: Sequence[str] = ()
    bf16: bool = False


TWO_THREADS = ("cluster=in_process", "cluster.cpus_per_worker=2", "engine.micro_batch_tokens=2048")
ON_RAY = (
    Side("rlcore on Ray, 1 worker, 1 core", 1, ("cluster=local", "cluster.workers=1", TWO_THREADS[-1])),
    Side("rlcore on Ray, 2 workers, 2 cores", 2, ("cluster=local", "cluster.workers=2", TWO_THREADS[-1])),
)
"""How the long tail gains from a second worker with a core of its own."""


@dataclass(frozen=True)
class Run:
    """Seconds and tokens of each counted step, and the most memory of all processes (proportional set size, bytes).

    `rows`: of rlcore, all metrics of those steps.
    """

    seconds: list[float]
    tokens: list[float]
    memory: float
    rows: Sequence[Mapping[str, float]] = ()


def run(work: Work, side: Side, folder: Path) -> Run:
    """Train in processes of their own, bound to the side's cores."""
    is_trl = side.name.startswith("TRL")
    file = folder / "steps.jsonl" if is_trl else folder / "run" / "metrics.jsonl"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("OMP_WAIT_POLICY", None)  # as each program has it by itself; of rlcore, PASSIVE in the workers on Ray
    if side.name.startswith(OLD_TRL):
        env["PYTHONPATH"] = str(OLD_PATH)
    cores = set(range(side.cores))
    with (folder / "log").open("w") as log:
        command = trl_command(work, side, folder, file) if is_trl else rlcore_command(work, side, folder)
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, cores)
        )
        memory = Memory(process.pid)
        memory.start()
        status = process.wait()
    if status:
        raise RuntimeError(f"{side.name} failed:\n{(folder / 'log').read_text()[-4000:]}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if is_trl:
        counted = rows[work.warm :]
        return Run([row["seconds"] for row in counted], [row["tokens"] for row in counted], memory.most)
    counted = [row for row in rows if "time/step" in row][work.warm :]
    seconds = [row["time/step"] for row in counted]
    return Run(
        seconds, [row["throughput/tokens_per_second"] * row["time/step"] for row in counted], memory.most, counted
    )


def trl_command(work: Work, side: Side, folder: Path, file: Path) -> list[str]:
    """Return the command that trains with TRL and writes a line for each step to `file`."""
    names = ("algorithm", "model", "data", "reward", "prompts", "samples", "response_len", "steps", "lr", "micro_batch")
    asked = {name: getattr(work, name) for name in names}
    asked |= {"threads": side.cores, "bf16": side.bf16, "out": str(folder / "out"), "file": str(file)}
    return [str(PEER), str(HERE / "trl_side.py"), json.dumps(asked)]


def rlcore_command(work: Work, side: Side, folder: Path) -> list[str]:
    """Return the command that trains with rlcore, in `folder`/run."""
    command = [sys.executable, "-m", "rlcore.cli", "train", f"algo={work.algorithm}", "data=file"]
    command += [setting.format(samples=work.samples) for setting in ALGORITHMS[work.algorithm]]
    command += [f"model.path={work.model}", f"data.path={work.data}", f"reward.path={work.reward}:score"]
    command += [f"data.batch_size={work.prompts}", "data.prompt_len=128"]
    command += [f"rollout.response_len={work.response_len}", f"engine.lr={work.lr}"]
    command += [f"trainer.total_steps={work.steps}", "trainer.eval_every=0", "tracker=none"]
    return [*command, f"run.dir={folder / 'run'}", f"model.dtype={'bf16' if side.bf16 else 'fp32'}", *side.settings]


class Memory(threading.Thread):
    """Watches the memory of a process and all its descendants until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.most = pid, 0.0

    def run(self) -> None:
        """See Thread."""
        while Path(f"/proc/{self.pid}/status").exists():
            self.most = max(self.most, float(sum(proportional(pid) for pid in tree(self.pid))))
            time.sleep(0.5)


def tree(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    found, at = [pid], 0
    while at < len(found):
        for children in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:  # it has ended meanwhile
                continue
        at += 1
    return found


def proportional(pid: int) -> int:
    """Return a process's proportional set size in bytes; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def alternate(work: Work, sides: Sequence[Side], rounds: int) -> dict[str, list[Run]]:
    """Run the sides in turn, `rounds` times."""
    found: dict[str, list[Run]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            with tempfile.TemporaryDirectory() as folder:
                found[side.name].append(run(work, side, Path(folder)))
    return found


def rates(runs: Sequence[Run]) -> list[float]:
    """Return steps per second of each run, by its median step."""
    return [1 / statistics.median(run.seconds) for run in runs]


def throughputs(runs: Sequence[Run]) -> list[float]:
    """Return prompt and response tokens per second of each run."""
    return [sum(run.tokens) / sum(run.seconds) for run in runs]


def figures(found: Mapping[str, Sequence[Run]]) -> list[Figure]:
    """Return what was measured of each side."""
    made = []
    for side, runs in found.items():
        made.append(Figure(side, "steps", "1/s", rates(runs)))
        made.append(Figure(side, "prompt and response tokens", "1/s", throughputs(runs)))
        made.append(Figure(side, "peak memory of all processes", "GiB", [run.memory / GIB for run in runs]))
    return made


def quickstart() -> bool:
    """Measure the shipped model's small steps and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        work = small_steps(Path(folder))
        sides = [
            Side(TRL, 1),
            Side("rlcore in process, 1 core", 1, ["cluster=in_process"]),
            Side(
                "rlcore on Ray, 2 workers, 2 cores", 2, ["cluster=local", "cluster.workers=2", "engine.torch.shard=1"]
            ),
        ]
        found = alternate(work, sides, rounds=5)
    peer, alone, ray = (statistics.median(rates(found[side.name])) for side in sides)
    return QUICKSTART.write(figures(found), [IN_PROCESS.at(alone / peer), RAY.at(ray / peer)], QUICKSTART_NOTES)


def small_steps(folder: Path) -> Work:
    """Write the quickstart's data and return its work."""
    for split in ("train", "eval"):
        rows = [{"prompt": each.prompt, "answer": str(each.result)} for each in problems(split)]
        write_rows(folder / f"{split}.jsonl", rows)
    return Work(str(TINY), str(folder), str(HERE / "sums.py"), prompts=16, response_len=16, steps=60, warm=10)


QUICKSTART_NOTES = """\
The shipped model (Qwen2, 1 M parameters), GRPO without a reference, 16 prompts x 8 samples, at most 16 new tokens,
AdamW, one optimizer step a batch, fp32. TRL: one process, one thread on one core, Hugging Face generation, 128 rows in
one micro-batch. Runs of 60 steps in turn, the first 10 do not count; a run's steps/s are of its median step. rlcore
scores in isolated processes and writes its metrics and samples; TRL does neither."""


def long_tail() -> bool:
    """Measure responses of very different length in fp32 and write the results."""
    return _long_tail(LONG_TAIL, bf16=False)


def long_tail_bf16() -> bool:
    """Measure them in bf16, which takes four times as long where there are no units for it."""
    return _long_tail(LONG_TAIL_BF16, bf16=True)


def _long_tail(benchmark: Benchmark, *, bf16: bool) -> bool:
    sides = [Side(TRL, 2, bf16=bf16), Side("rlcore in process", 2, TWO_THREADS, bf16=bf16)]
    if not bf16:
        sides += ON_RAY
    with tempfile.TemporaryDirectory() as folder:
        found = alternate(long_tails(Path(folder)), sides, rounds=5)
    speeds = [statistics.median(throughputs(found[side.name])) for side in sides]
    theirs, own = (statistics.median(run.memory for run in found[side.name]) for side in sides[:2])
    bars = [(SPEED_BF16 if bf16 else SPEED).at(speeds[1] / speeds[0]), MEMORY.at(own / theirs)]
    if not bf16:
        bars.append(SECOND_WORKER.at(speeds[3] / speeds[2]))
    kind = "bf16" if bf16 else "fp32"
    return benchmark.write(figures(found), bars, LONG_TAIL_NOTES.format(kind=kind))


def long_tails(folder: Path) -> Work:
    """Write the long-tail workload's model and data and return its work."""
    numbers = random.Random(0)
    alphabet = write_characters(folder / "model")
    texts = ["".join(numbers.choices(alphabet, k=numbers.randint(4, 60))) for _ in range(400)]
    write_rows(folder / "train.jsonl", [{"prompt": text, "answer": ""} for text in texts[1:]])
    write_rows(folder / "eval.jsonl", [{"prompt": texts[0], "answer": ""}])
    return Work(
        str(folder / "model"),
        str(folder),
        str(HERE / "digits.py"),
        prompts=8,
        response_len=512,
        steps=2,
        warm=1,
        micro_batch=16,
        lr=1e-6,
    )


LONG_TAIL_NOTES = """\
A random-weight Qwen2 of 8 layers, hidden 256, intermediate 1024, 8 heads, 2 key-value heads, 80 characters, so that
response lengths are geometric with a mean near 64; 8 prompts of 8 to 64 tokens x 8 samples, at most 512 new tokens,
{kind}, GRPO without a reference, one optimizer step a batch. Both sides on the same two cores with two threads, rlcore
in process (and on Ray, for the gain of a second worker); OMP_WAIT_POLICY is set for neither. TRL's micro-batches are of
16 rows, rlcore's of at most 2,048 tokens. Tokens/s: prompt and response tokens of the second of a run's two steps by
its seconds. Memory: the most proportional set size of all processes of the run, seen twice a second."""


def write_rows(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a split of a data set that both sides read."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
