"""A run of rlcore in a process of its own, and its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import Size

HERE = Path(__file__).parent
GB = 1e9


class PartFailed(Exception):
    """A process that a part started failed; the text is the end of its output."""


@dataclass(frozen=True)
class Trained:
    """`steps`: the metrics of each finished step. `peak`: most bytes of tensors on the device."""

    steps: Sequence[Mapping[str, float]]
    peak: float
    log: str

    def times(self, name: str) -> list[float]:
        """Return the seconds of one kind of work, by step."""
        return [step.get(f"time/{name}", 0.0) for step in self.steps]


def on_device(size: Size, *, on_ray: bool = False, share: float = 1.0) -> list[str]:
    """Return the settings that put a run on the size's device."""
    gpus = share if size.is_card else 0.0
    place = "local" if on_ray else "in_process"
    return [f"cluster={place}", "cluster.workers=1", f"cluster.gpus_per_worker={gpus}"]


def grpo(size: Size, model: str, folder: Path, *, prompts: int, response_len: int) -> list[str]:
    """Return the settings of GRPO without a reference on the word problems."""
    return [
        "algo=grpo",
        "algo.kl_coef=0",
        f"algo.group_size={size.samples}",
        f"model.path={folder / model}",
        f"model.dtype={size.dtype}",
        "data=file",
        f"data.path={folder / 'data'}",
        f"reward.path={folder / 'reward.py'}:score",
        f"data.batch_size={prompts}",
        f"rollout.response_len={response_len}",
    ]


def train(
    out: Path,
    settings: Sequence[str],
    *,
    stop: int = 0,
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    limit: float = 300.0,
) -> Trained:
    """Train in `out`, ending after step `stop` (0: as the settings say).

    A run that reaches `limit` seconds is ended, and the steps that it finished are returned. Raises PartFailed when no
    step was finished.
    """
    meter = out.parent / f"{out.name}.meter"  # with_suffix would cut a name at "0.5B"
    env = {**os.environ, **(environment or {}), "BENCH_METER": str(meter), "BENCH_STOP": str(stop)}
    files = [HERE / "meter.py", *plugins]
    command = [sys.executable, "-m", "rlcore.cli", "train", *settings]
    for file in files:
        command += ["-p", str(file)]
    command += ["tracker=none", "trainer.eval_every=0", f"run.dir={out}"]
    log = out.parent / f"{out.name}.log"
    with log.open("a") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    steps = _lines(out / "metrics.jsonl")
    if not steps or (process.returncode and process.returncode != -signal.SIGKILL):
        raise PartFailed(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Trained(steps, max((line["peak"] for line in _lines(meter)), default=0), log.read_text())


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, lines) if line.get("step", 0) > 0]
