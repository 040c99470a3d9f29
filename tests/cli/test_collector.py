"""The garbage collector: off while a command imports; on while it trains, but for what was there, and after it."""

import gc
import subprocess
import sys

import pytest

from rlcore.cli import main
from rlcore.collector import pause_collector, resume_collector

NOTES = """
import gc
from rlcore import hookimpl
RLCORE_API = 1
print("loaded", gc.isenabled())

@hookimpl
def rlcore_run_start(run):
    print("started", gc.isenabled(), gc.get_freeze_count() > 10_000)
"""

SMALL = [
    "data.max_rows=128",
    "data.batch_size=1",
    "rollout.response_len=1",
    "trainer.total_steps=1",
    "trainer.eval_every=0",
    "tracker=none",
]


@pytest.fixture(autouse=True)
def collector_on():
    assert gc.isenabled()
    yield
    gc.enable()
    gc.unfreeze()


def test_what_was_off_stays_off():
    gc.disable()
    pause_collector()
    resume_collector()
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_pausing_twice_is_pausing_once():
    pause_collector()
    pause_collector()
    assert not gc.isenabled()
    resume_collector()
    assert gc.isenabled()


def test_nothing_is_looked_through_at_the_exit():
    last = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0))"  # the first to come ends last
    code = f"{last}; from rlcore.collector import pause_collector; pause_collector()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.e2e
def test_it_is_off_until_the_run_has_started(tmp_path, capsys):
    hooks = tmp_path / "notes.py"
    hooks.write_text(NOTES)
    argv = ["train", "-p", str(hooks), "algo=grpo", "cluster=in_process", *SMALL]
    assert main([*argv, f"run.dir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert "loaded False" in printed
    assert "started True True" in printed
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.e2e
def test_what_one_job_of_a_sweep_has_left_is_looked_through_in_the_next(tmp_path, capsys):
    hooks = tmp_path / "notes.py"
    hooks.write_text(NOTES)
    argv = ["train", "--multirun", "-p", str(hooks), "algo=grpo", "cluster=in_process", *SMALL, "trainer.seed=1,2"]
    assert main([*argv, f"run.dir={tmp_path / 'sweep'}"]) == 0
    started = [line for line in capsys.readouterr().out.splitlines() if line.startswith("started")]
    assert started == ["started True True", "started True False"]


def test_it_is_on_after_a_command_that_fails(capsys):
    assert main(["train", "algo=grpo", "data.batch_size=0"]) == 2
    assert "data.batch_size" in capsys.readouterr().err
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
