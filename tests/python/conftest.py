"""One run of the command line and the same from Python, in this process, on a handful of rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.cli import main

TRAIN = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((3, 4), (12, 5), (8, 8), (7, 1), (30, 4), (6, 6))]
HELD_OUT = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((2, 2), (5, 3), (11, 1))]
SETTINGS: dict[str, Any] = {
    "cluster": "in_process",
    "tracker": "none",
    "algo.group_size": 2,
    "data.batch_size": 2,
    "rollout.response_len": 5,
    "engine.lr": 1e-3,
    "trainer.total_steps": 3,
    "trainer.eval_every": 3,
    "trainer.samples_per_step": 100,
}
REWARD = """\
class Digits:
    def __init__(self, full):
        self.full = full

    def share(self, response, answer):
        return self.full * sum(a == b for a, b in zip(response, answer)) / len(answer)

digits = Digits(full=1.0)

def score(prompt, response, answer):
    return digits.share(response, answer)
"""


@dataclass(frozen=True)
class Case:
    """What one run is of, as `rlcore.train` takes it, and as overrides.

    reward: the source of `score`, whose module cannot be imported, as a script's or a notebook's.
    """

    score: Callable[..., float]
    command: list[str]
    reward: str = REWARD
    rows: Sequence[dict[str, str]] = tuple(TRAIN)
    held_out: Sequence[dict[str, str]] = tuple(HELD_OUT)
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)

    def train(self, folder: Path, **changes: Any) -> Any:
        given = {
            "data": self.rows,
            "eval_data": self.held_out,
            "reward": self.score,
            "model": "tiny",
            **SETTINGS,
            **changes,
        }
        return rlcore.train(algo="grpo", run_dir=folder, **given)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    for name, rows in (("train", TRAIN), ("test", HELD_OUT)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARD)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(REWARD, names)
    words = [f"{key}={value}" for key, value in SETTINGS.items()]
    words += ["algo=grpo", "data=file", f"data.path={folder}", f"reward.path={folder}/mine.py:score"]
    return Case(names["score"], words)


@pytest.fixture(scope="session")
def by_command(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the command line."""
    folder = tmp_path_factory.mktemp("command") / "run"
    assert main(["train", *case.command, f"run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="session")
def in_python(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run, by rlcore.train."""
    return case.train(tmp_path_factory.mktemp("python") / "run")
