"""Each check of a config runs once before a run, whichever command starts it, and its pools are planned once."""

from collections import Counter
from dataclasses import replace

import pytest

from rlcore.cli import main
from rlcore.roles import placement
from rlcore.training import preflight


@pytest.fixture
def counted(monkeypatch):
    """Count the calls of each check, and of the planning of pools, by name."""
    calls: Counter[str] = Counter()

    def wrapped(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    checks = [
        replace(check, function=wrapped(check.function.__name__.strip("_"), check.function))
        for check in preflight.CHECKS
    ]
    monkeypatch.setattr(preflight, "CHECKS", checks)
    monkeypatch.setattr(placement, "check_pools", wrapped("check_pools", placement.check_pools))
    return calls


CHECKS = preflight.CHECKS


def once(purpose, times=1):
    """The counts where each check of a purpose ran that many times, and the pools were planned as often."""
    names = [check.function.__name__.strip("_") for check in CHECKS if purpose in check.purposes]
    return dict.fromkeys([*names, "check_pools"], times)


ONE_STEP = ["algo=grpo", "trainer.total_steps=1", "data.max_rows=128", "data.eval_size=2"]


def test_config(small, counted, capsys):
    assert main(["config", "algo=grpo", *small]) == 0
    assert counted == once("train")


def test_train(small, counted, tmp_path):
    assert main(["train", *ONE_STEP, *small, f"run.dir={tmp_path / 'run'}"]) == 0
    assert counted == once("train")


def test_a_sweep_checks_each_job_once(small, counted, tmp_path):
    assert main(["train", "--multirun", *ONE_STEP, *small, f"run.dir={tmp_path}", "trainer.seed=1,2"]) == 0
    assert counted == once("train", times=2)


def test_eval(counted, capsys):
    assert (
        main(["eval", "tiny", "cluster=in_process", "data.max_rows=128", "data.eval_size=2", "rollout.response_len=2"])
        == 0
    )
    assert counted == once("evaluate")


def test_plan(counted, capsys):
    """Its one placement is that of the recorded step, in this process."""
    assert main(["plan", "algo=grpo", "plan.gpus=2", "plan.device=h100"]) == 0
    assert counted == once("plan")
