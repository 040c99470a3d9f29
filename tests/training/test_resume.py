"""A run that is interrupted and goes on: the same as if it had never stopped. And what tells about it meanwhile."""

import json
import os
import signal
import time

import pytest

from rlcore.errors import DataError
from rlcore.plugins import PluginManager

COUNTING = """
from dataclasses import dataclass

import torch

from rlcore import Algorithm, AlgorithmSpec, hookimpl, option
from rlcore.ops import masked_sum, objective

RLCORE_API = 1

@dataclass(frozen=True)
class Settings:
    group_size: int = option(2, "samples of a prompt")

def loss(out, batch, config):
    mask = batch["response_mask"]
    gain = (batch["counting_weight"] * (batch["scores"] - 0.5))[:, None]
    return {"policy": objective(-masked_sum(out.log_probs * gain, mask), mask.sum())}

class Counting(Algorithm):
    '''Learns the faster the longer it has run, by a count of its own.'''

    config_class = Settings

    def __init__(self, config):
        super().__init__(config)
        self.count = 0

    def step(self, run, prompts):
        self.count += 1
        batch = run.actor.generate(prompts.repeat(self.config.group_size))
        run.log(count=self.count, version=int(batch["weights_version"].max()))
        batch = batch.union(run.reward(batch))
        batch["counting_weight"] = torch.full((len(batch),), float(self.count))
        return run.actor.update(batch, loss=loss)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("counting", Counting)
"""
# One epoch is 4 steps of 2 of the 8 prompts; clipping would hide how large the loss is.
OPTIONS = ["algo=counting", "trainer.total_steps=6", "trainer.checkpoint_every=1", "engine.clip_grad=0"]
OPTIONS += ["trainer.eval_every=2", "trainer.keep_checkpoints=0"]


class Watching(PluginManager):
    """Keeps what the heartbeat said at the end of each step; does `act` at the end of step `at`."""

    at, beats = 0, None

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        self.beats = [*(self.beats or []), json.loads((run.dir / "heartbeat.json").read_text())]
        if step == self.at:
            self.act()

    def act(self):
        raise RuntimeError("stop here")


class Signalled(Watching):
    def act(self):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def run_counting(train_small, tmp_path_factory):
    """Train with the counting algorithm and return its plugins and summary."""
    file = tmp_path_factory.mktemp("plugin") / "counting.py"
    file.write_text(COUNTING)

    def run(folder, manager=Watching, at=0):
        plugins = manager.load([str(file)])
        plugins.at = at
        return plugins, train_small(folder, *OPTIONS, plugins=plugins)

    return run


@pytest.fixture(scope="module")
def straight(run_counting, tmp_path_factory):
    """The folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_counting(folder)
    return folder


@pytest.fixture(scope="module")
def resumed(run_counting, tmp_path_factory):
    """The folder of a run that broke at the end of step 3, before its checkpoint; and its heartbeats in both parts."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        run_counting(folder, at=3)
    broken = json.loads((folder / "heartbeat.json").read_text())
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4  # step 3 is to be done again
    plugins, summary = run_counting(folder)
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    return folder, broken, plugins.beats


def test_the_algorithm_goes_on_with_its_own_state(resumed, straight, metrics_of):
    """Its count, and a loss that grows with it: the metrics are equal to the last bit. So does the weights' version."""
    metrics = metrics_of(resumed[0])
    assert [row.get("count") for row in metrics] == [None, 1, 2, 3, 4, 5, 6]
    assert [row.get("version") for row in metrics] == [None, 0, 1, 2, 3, 4, 5]
    assert metrics == metrics_of(straight)
    assert all(row["train/grad_norm"] > 0 for row in metrics[1:])
    assert any("eval/accuracy" in row for row in metrics[4:])


def test_each_step_is_in_the_metrics_once(resumed, metrics_of):
    assert [row["step"] for row in metrics_of(resumed[0])] == [0, 1, 2, 3, 4, 5, 6]


def test_the_loader_goes_on_where_it_was(resumed, straight, samples_of):
    """No prompt twice in an epoch and none left out, and the second epoch is another order of the same."""
    samples = samples_of(resumed[0])
    assert sorted(samples) == [1, 2, 3, 4, 5, 6]
    uids = [list(dict.fromkeys(row["uid"] for row in samples[step])) for step in sorted(samples)]
    assert all(len(of_step) == 2 for of_step in uids)
    assert sorted(uid for of_step in uids[:4] for uid in of_step) == [f"0:{row}" for row in range(8)]
    later = [uid for of_step in uids[4:] for uid in of_step]
    assert len(set(later)) == 4
    assert all(uid.startswith("1:") for uid in later)
    assert samples == samples_of(straight)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [2, 4])
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on_from_it(
    run_counting, straight, metrics_of, samples_of, tmp_path, at
):
    folder = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    _, summary = run_counting(folder, Signalled, at=at)
    assert (summary["status"], summary["steps"]) == ("interrupted", at)
    assert signal.getsignal(signal.SIGTERM) is before
    assert json.loads((folder / "heartbeat.json").read_text())["status"] == "interrupted"
    assert metrics_of(folder) == metrics_of(straight)[: at + 1]
    run_counting(folder)
    assert metrics_of(folder) == metrics_of(straight)
    assert samples_of(folder) == samples_of(straight)
    one, other = (json.loads((path / "summary.json").read_text()) for path in (folder, straight))
    for name in ("status", "steps", "accuracy_before", "accuracy_after"):
        assert one[name] == other[name]


def test_the_heartbeat_says_who_runs_how_far_and_since_when(resumed):
    import socket

    folder, broken, beats = resumed
    assert (broken["status"], broken["step"], broken["checkpoint_step"]) == ("failed", 3, 2)
    # At the end of a step, its own checkpoint is still to come.
    assert [(beat["status"], beat["step"], beat["checkpoint_step"]) for beat in beats] == [
        ("running", 3, 2),
        ("running", 4, 3),
        ("running", 5, 4),
        ("running", 6, 5),
    ]
    last = json.loads((folder / "heartbeat.json").read_text())
    assert set(last) == {"host", "pid", "time", "step", "status", "checkpoint_step"}
    assert (last["status"], last["step"], last["checkpoint_step"]) == ("finished", 6, 6)
    assert (last["host"], last["pid"]) == (socket.gethostname(), os.getpid())
    times = [broken["time"], *(beat["time"] for beat in beats), last["time"], time.time()]
    assert times == sorted(times)
    assert time.time() - times[0] < 600
    assert not list(folder.glob("heartbeat.w*"))


@pytest.fixture
def show(monkeypatch, capsys):
    """`rlcore samples ...`: what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    command = PluginManager.load().commands()["samples"]

    def run(*argv: object) -> str:
        capsys.readouterr()
        assert command.main([str(value) for value in argv]) == 0
        return capsys.readouterr().out

    return run


def table(printed: str) -> list[list[str]]:
    rows = [line.strip("│┃ ").split("│") for line in printed.splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_samples_shows_what_was_sampled(straight, show, samples_of):
    samples = samples_of(straight)
    for step, printed in ((6, show(straight)), (2, show(straight, "--step", 2))):
        assert f"step {step}" in printed
        expected = [
            [row["uid"], row["prompt_text"], row["response_text"], row["answer"], str(row["scores"])]
            for row in samples[step]
        ]
        assert len(expected) == 4
        assert [row[:5] for row in table(printed)] == expected


def test_samples_shows_why_a_reward_failed_and_text_as_it_is(tmp_path, show):
    (tmp_path / "samples").mkdir()
    row = {"uid": "0:1", "prompt_text": "[bold]2+2=[/bold]", "response_text": "5", "answer": "4", "scores": 0.0}
    failed = {**row, "reward_detail": {"function": "exact", "cause": "ValueError: [no] luck"}}
    (tmp_path / "samples" / "step_000010.jsonl").write_text(json.dumps(failed) + "\n")
    (tmp_path / "samples" / "step_000009.jsonl").write_text(json.dumps({**row, "reward_detail": None}) + "\n")
    (shown,) = table(show(tmp_path))
    assert shown == ["0:1", "[bold]2+2=[/bold]", "5", "4", "0.0", "exact: ValueError: [no] luck"]
    (earlier,) = table(show(tmp_path, "--step", 9))
    assert earlier[5:] in ([""], [])


def test_samples_of_what_is_not_there(straight, show, tmp_path):
    with pytest.raises(DataError, match="holds no samples; give the folder of a run"):
        show(tmp_path)
    with pytest.raises(DataError, match=r"step 7 of .* has no samples; give a step from 1 to 6"):
        show(straight, "--step", 7)
