"""Commands that train: sweeps, repeats, local files, evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlcore.cli import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FILES = Path(__file__).parents[1] / "fixtures" / "plugins"
SMALL = [
    "data.max_rows=128",
    "data.batch_size=2",
    "rollout.response_len=4",
    "trainer.total_steps=1",
    "trainer.eval_every=0",
    "tracker=none",
]
IN_PROCESS = ["cluster=in_process", *SMALL]


def rlcore(folder: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlcore.cli", *argv],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(run: Path) -> list[dict[str, float]]:
    """Return a run's metrics without those that depend on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "timeline/", "throughput/"))} for row in rows]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a sweep over two seeds has run."""
    folder = tmp_path_factory.mktemp("sweep")
    printed = rlcore(
        folder, "train", "algo=grpo", "algo.group_size=2", *IN_PROCESS, "run.dir=s", "-m", "trainer.seed=3,4"
    )
    assert "job 2 of 2: algo=grpo" in printed
    assert "trainer.seed=4 -> s/1" in printed
    return folder


def test_sweep_gives_each_job_its_run_folder(swept):
    assert [path.name for path in swept.iterdir()] == ["s"]  # no outputs/, multirun/, .hydra/
    for job, seed in (("0", 3), ("1", 4)):
        run = swept / "s" / job
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert (config["trainer"]["seed"], config["run"]["dir"]) == (seed, f"s/{job}")
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert numbers(swept / "s" / "0") != numbers(swept / "s" / "1")


def test_saved_config_repeats_the_run_of_another_process(swept, monkeypatch):
    monkeypatch.chdir(swept)
    assert main(["train", "--config", "s/0/config.yaml", "run.dir=again"]) == 0
    assert numbers(swept / "again") == numbers(swept / "s" / "0")


def test_eval_of_a_run_and_of_a_model(swept, monkeypatch, capsys):
    monkeypatch.chdir(swept)
    small = ["data.max_rows=128", "data.eval_size=2", "trainer.eval_samples=1"]
    for words in (["s/0", *small], ["tiny", *small, "cluster=in_process", "rollout.response_len=4"]):
        assert main(["eval", *words]) == 0
        assert "accuracy" in capsys.readouterr().out


@pytest.mark.ray
def test_local_file_trains_on_ray_by_value(tmp_path):
    plugin = FILES / "local_reinforce.py"
    rlcore(
        tmp_path, "train", "-p", str(plugin), "algo=reinforce", "reward=brief", *SMALL, "cluster.workers=2", "run.dir=r"
    )
    (row,) = numbers(tmp_path / "r")
    assert 0 < row["reward/mean"] < 1
    assert row["reward/errors"] == 0
    assert row["train/optimizer_steps"] == 1
