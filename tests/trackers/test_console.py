import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlcore.config.schema import Config, EvalConfig, EvalSetConfig, TrainerConfig
from rlcore.trackers.console import ConsoleTracker

CONFIG = Config(algorithm="grpo", algo=None, trainer=TrainerConfig(total_steps=3))
METRICS = {
    "reward/mean": 0.5,
    "kl/mean": 0.0012,
    "throughput/tokens_per_second": 12345.0,
    "time/left": 3700.0,
    "health/equal_groups": 0.25,
    "health/effective_tokens": 1234.0,
    "health/truncated": 0.03,
    "train/grad_norm": float("nan"),
    "response/mean_length": 4.5,
    "reward/errors": 0.0,
}
SUMMARY = {
    "steps": 2,
    "train_seconds": 123.4,
    "tokens_per_second": 1234.6,
    "accuracy_before": 0.31,
    "accuracy_after": 0.9,
}


@pytest.fixture(autouse=True)
def _rlcore_on_the_path(monkeypatch):
    scripts = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")


def test_the_commands_to_try_next_work_where_rlcore_is_not_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)  # from the folder that holds the venv the path is a relative one
    assert f"  {Path(sys.executable).parent / 'rlcore'} plugins\n" in output(False, "finished", folder="runs/a")


def output(terminal, status="finished", summary=SUMMARY, folder="runs/quick start"):
    file = io.StringIO()
    tracker = ConsoleTracker(CONFIG, Path(folder), Console(file=file, force_terminal=terminal, width=100))
    tracker.start(0)
    tracker.log(0, {"eval/accuracy": 0.31})
    tracker.log(1, METRICS)
    tracker.saved(1, Path("runs/quick/checkpoints/step_000001"))
    tracker.log(2, {**METRICS, "eval/accuracy": 0.9, "reward/errors": 3.0})
    tracker.finish(status, summary)
    return file.getvalue()


@pytest.mark.parametrize("held_out", [True, False])
def test_the_accuracies_of_named_evaluations_stay_until_the_next(held_out):
    file = io.StringIO()
    config = replace(CONFIG, eval=EvalConfig(held_out, {"math500": EvalSetConfig()}))
    tracker = ConsoleTracker(config, Path("runs/a"), Console(file=file, force_terminal=False, width=100))
    tracker.log(0, {"eval/accuracy": 0.31, "eval/math500/accuracy": 0.125})
    tracker.log(1, METRICS)
    own = "  accuracy 0.310" if held_out else ""
    first, second = file.getvalue().splitlines()
    assert first == f"step 0/3{own}  math500 0.125"
    assert second.startswith(f"step 1/3  reward 0.500{own}  math500 0.125  KL 0.0012  ")


def test_plain_lines_where_there_is_no_terminal():
    health = "equal groups 25%, effective tokens 1,234, truncated 3%, gradient norm NAN, response length 4.5"
    assert output(terminal=False).splitlines() == [
        "rlcore grpo · runs/quick start",
        "step 0/3  accuracy 0.310",
        f"step 1/3  reward 0.500  accuracy 0.310  KL 0.0012  tokens/s 12,345  left 1:01:40  | {health}",
        "checkpoint of step 1: runs/quick/checkpoints/step_000001",
        f"step 2/3  reward 0.500  accuracy 0.900  KL 0.0012  tokens/s 12,345  left 1:01:40  | {health},"
        " 3 rewards failed",
        "finished: 2 steps in 2:03, 1,235 tokens/s",
        "held-out accuracy: 0.310 before, 0.900 after",
        "run folder: runs/quick start",
        "next:",
        "  rlcore train --config 'runs/quick start/config.yaml' 'run.dir=\"runs/quick start-again\"' trainer.seed=1",
        "  rlcore plugins",
    ]


def test_a_live_display_in_a_terminal_that_leaves_the_summary_behind():
    text = output(terminal=True)
    shown, _, after = text.rpartition("\x1b[?25h")  # the cursor comes back when the display ends
    for part in (
        "step 2/3",
        "━",
        "held-out accuracy",
        "0.900",
        "12,345",
        "1:01:40",
        "equal groups 25%",
        "rewards failed",
    ):
        assert part in shown
    assert "\x1b[1;31mNAN" in shown
    assert "finished: 2 steps" in after
    assert "reward" not in after


def test_what_is_missing_is_a_dash():
    file = io.StringIO()
    tracker = ConsoleTracker(CONFIG, Path("r"), Console(file=file, force_terminal=False))
    tracker.log(1, {"time/left": float("inf")})
    assert "reward –  accuracy –  KL –  tokens/s –  left INF  | equal groups –" in file.getvalue()


def test_an_interrupted_run_says_how_to_go_on_and_a_failed_one_where_to_look():
    assert "  rlcore train --config runs/a/config.yaml run.dir=runs/a\n" in output(
        False, "interrupted", folder="runs/a"
    )
    failed = output(False, "failed", summary={}, folder="runs/a")
    assert "failed\nrun folder: runs/a\n" in failed
    assert "  tail -n 50 runs/a/rlcore.log\n" in failed


def test_the_commands_at_the_end_can_work(tmp_path):
    run = tmp_path / "a"
    assert " eval " not in output(False, "finished", folder=str(run))  # there is no checkpoint
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "checkpoints" / "step_00000001" / "manifest.json").touch()
    assert f"  rlcore eval {run}\n" in output(False, "failed", folder=str(run))
    assert f"run.dir={run}-again trainer" in output(False, "finished", folder=str(run))
    (tmp_path / "a-again").mkdir()
    assert f"run.dir={run}-again2 trainer" in output(False, "finished", folder=str(run))
    given = {**SUMMARY, "plugin_files": ["/x/my.py"], "plugins_blocked": ["hooks.heartbeat"]}
    options = "-p /x/my.py -p no:hooks.heartbeat"
    printed = output(False, "interrupted", given, folder=str(run))
    for words in (f"eval {options} {run}", f"train {options} --config", f"plugins {options}"):
        assert f"  rlcore {words}" in printed


def test_a_run_in_the_working_directory_has_a_free_folder_beside_it(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    for status in ("finished", "interrupted", "failed"):
        printed = output(False, status, folder=".")
    assert "tail -n 50 rlcore.log" in printed
    assert f"run.dir={tmp_path}/a-again trainer" in output(False, "finished", folder=".")
