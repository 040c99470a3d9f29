"""What goes wrong in a run: interruption, a worker that dies, a folder that cannot be used, rewards that misbehave."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, DataError, WorkerError
from rlcore.plugins import PluginManager

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
HERE = [
    "cluster=in_process",
    "data.max_rows=128",
    "trainer.eval_every=0",
    "data.batch_size=4",
    "rollout.response_len=6",
]
FILES = Path(__file__).parents[1] / "fixtures" / "plugins"


def wait_for(condition, process, printed: Path, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, printed.read_text()
        assert time.monotonic() < deadline, printed.read_text()
        time.sleep(0.05)


def steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_checkpoints_and_leaves_and_the_run_can_go_on(start_command, train_here, tmp_path, stop):
    folder = tmp_path / "run"
    more = [*HERE, "algo.group_size=4", "trainer.total_steps=20"]
    process = start_command(folder, *more)
    wait_for(lambda: steps(folder) >= 2, process, tmp_path / "printed")
    os.kill(process.pid, stop)
    assert process.wait(60) == 130
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step_")) == summary["steps"] == steps(folder)
    assert 2 <= summary["steps"] < 20
    for log in (folder / "rlcore.log", tmp_path / "printed"):
        assert "stopping with a checkpoint after this step" in log.read_text()
    # Only the same run may go on in this folder.
    with pytest.raises(ConfigError, match=r"another config; differing: trainer\.seed"):
        train_here(folder, *more, "trainer.seed=1")
    resumed = train_here(folder, *more)
    assert resumed.summary["status"] == "finished"
    assert [row["step"] for row in resumed.numbers] == list(range(1, 21))


SLOW_REWARD = """
import time

def score(prompt, response, answer):
    time.sleep(5)
    return 1.0
"""


@pytest.mark.parametrize("cluster", ["in_process", pytest.param("local", marks=pytest.mark.ray)])
def test_the_second_signal_leaves_now(start_command, tmp_path, cluster):
    folder = tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    options = [f"cluster={cluster}", *HERE[1:], "trainer.total_steps=9", "reward.path=slow.py:score"]
    process = start_command(folder, *options)
    wait_for(lambda: (folder / "heartbeat.json").exists(), process, tmp_path / "printed")
    time.sleep(2)  # into the step, which takes 32 rows times 5 seconds
    start = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert time.monotonic() - start < 30
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert not list((folder / "checkpoints").glob("*"))


@pytest.mark.ray
def test_a_first_ctrl_c_to_the_whole_terminal_spares_the_workers(start_command, tmp_path):
    """A terminal sends the signal to every process of the foreground group, Ray's among them."""
    folder = tmp_path / "run"
    process = start_command(folder, *HERE[1:], "trainer.total_steps=1000")
    wait_for(lambda: steps(folder) >= 1, process, tmp_path / "printed")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, (tmp_path / "printed").read_text()
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert len(list((folder / "checkpoints").iterdir())) == 1


DYING = """
import os, signal
from dataclasses import dataclass
from rlcore import Algorithm, AlgorithmSpec, hookimpl, option
from rlcore.ops import objective

RLCORE_API = 1

@dataclass(frozen=True)
class Settings:
    how: str = option("kill", "kill or raise")

def loss(out, batch, config):
    import torch.distributed as dist
    if dist.get_rank() == 1:
        print("these are my last words", flush=True)
        if config.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is on fire")
    return {"loss": objective(out.log_probs.sum(), batch["response_mask"].sum())}

class Dying(Algorithm):
    config_class = Settings

    def step(self, run, prompts):
        return run.actor.update(run.actor.generate(prompts), loss=loss)

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("dying", Dying)
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    ("how", "cause", "layout", "place"),
    [
        ("kill", "these are my last words", "engine.pp=1", "pp=0, tp=0, dp=1"),
        ("raise", "the disk is on fire", "engine.pp=1", "pp=0, tp=0, dp=1"),
        ("kill", "these are my last words", "engine.pp=2", "pp=1, tp=0, dp=0"),
    ],
)
def test_a_worker_that_dies_or_fails_mid_step_ends_the_run(
    ray_cluster, train_here, tmp_path, how, cause, layout, place
):
    """Rank 0 meanwhile waits for rank 1 in a collective, or for its gradient."""
    (tmp_path / "dying.py").write_text(DYING)
    plugins = PluginManager.load([str(tmp_path / "dying.py")])
    folder = tmp_path / "run"
    options = ["algo=dying", f"algo.how={how}", *HERE[1:], "cluster.workers=2", layout]
    with pytest.raises(WorkerError) as caught:
        train_here(folder, *options, plugins=plugins)
    ended = time.time()
    message = str(caught.value)
    assert re.search(rf"actor rank 1 of 2 \({place}", message), message
    assert "update" in message
    assert cause in message
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    died = (folder / "logs" / "actor-1.log").stat().st_mtime  # its last words were the last that it wrote
    assert ended - died < 30


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (lambda path: path.symlink_to("/proc/rlcore"), "cannot be written"),  # where even root may make nothing
        (lambda path: path.write_text("a file"), "cannot be written"),
        (lambda path: (path.mkdir(), (path / "thesis.tex").touch()), "holds files but no run"),
    ],
)
def test_a_folder_that_cannot_be_a_run_is_refused_before_anything_starts(train_here, tmp_path, arrange, message):
    arrange(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        train_here(tmp_path / "run", *HERE)


def test_a_full_disk_is_reported_and_leaves_earlier_checkpoints(train_here, tmp_path, monkeypatch):
    """The first checkpoint fits, the second does not: a limit on file size stands in for the disk."""
    import resource

    from rlcore.errors import CheckpointError

    folder = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    class Full(PluginManager):
        def step_end(self, run, step, metrics):
            super().step_end(run, step, metrics)
            if step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))

    try:
        with pytest.raises(CheckpointError, match="step_00000002"):
            train_here(folder, *HERE, "trainer.total_steps=3", "trainer.checkpoint_every=1", plugins=Full.load())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert (folder / "checkpoints" / "step_00000001" / "trainer.json").exists()
    train_here(folder, *HERE, "trainer.total_steps=3", "trainer.checkpoint_every=1")
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_a_finished_run_is_not_touched(train_here, tmp_path):
    folder = tmp_path / "run"
    train_here(folder, *HERE, "trainer.total_steps=1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds a finished run"):
        train_here(folder, *HERE, "trainer.total_steps=1")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


BAD_REWARDS = """
import time

def score(prompt, response, answer, uid, **columns):
    kind = int(uid.split(":")[1]) % 4
    if kind == 0:
        raise KeyError("no such thing")
    if kind == 1:
        time.sleep(60)
    if kind == 2:
        return float("nan")
    return 1.0
"""


def test_rewards_that_fail_are_counted_shown_and_do_not_end_the_run(train_here, tmp_path):
    (tmp_path / "bad.py").write_text(BAD_REWARDS)
    run = train_here(
        tmp_path / "run",
        *HERE,
        "algo.group_size=2",
        "trainer.total_steps=1",
        f"reward.path={tmp_path / 'bad.py'}:score",
        "reward.timeout=0.5",
        "reward.error_value=-1",
        "reward.max_failures=1",
    )
    rows = run.samples
    kinds = [int(row["uid"].split(":")[1]) % 4 for row in rows]
    assert len(rows) == 8
    for kind, row in zip(kinds, rows, strict=True):
        assert row["scores"] == (1.0 if kind == 3 else -1.0)
        cause = {0: "no such thing", 1: "0.5", 2: "nan", 3: "None"}[kind]
        assert cause in str(row["reward_detail"])
    assert run.numbers[0]["reward/errors"] == sum(kind != 3 for kind in kinds)
    assert set(kinds) & {0, 1, 2}


NAN_SCORES = """
import torch
from dataclasses import dataclass
from rlcore import Algorithm, AlgorithmSpec, hookimpl, option
from rlcore.ops import objective

RLCORE_API = 1

@dataclass(frozen=True)
class Settings:
    returns: str = option("number", "what a step returns")

def loss(out, batch, config):
    return {"loss": objective((out.log_probs * float("nan")).sum(), batch["response_mask"].sum())}

class Odd(Algorithm):
    config_class = Settings

    def step(self, run, prompts):
        batch = run.actor.generate(prompts)
        if self.config.returns == "nan loss":
            return run.actor.update(batch, loss=loss)
        return {"a": "text"} if self.config.returns == "text" else 3

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("odd", Odd)
"""


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("nan loss", r"the loss is not finite: term 'loss' is nan over rows uid=0:\d+ sample=0"),
        ("text", "a metric must be a number"),
        ("number", "must return a mapping of metrics"),
    ],
)
def test_an_algorithm_that_misbehaves_ends_the_run_with_a_clear_error(train_here, tmp_path, returns, message):
    (tmp_path / "odd.py").write_text(NAN_SCORES)
    plugins = PluginManager.load([str(tmp_path / "odd.py")])
    with pytest.raises(DataError, match=message):
        train_here(tmp_path / "run", "algo=odd", f"algo.returns={returns!r}", *HERE, plugins=plugins)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
