"""A finished run that goes on with more steps or another goal: as if it had been one run. About 10 s."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlcore.errors import CheckpointError, ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.checkpoint import checkpoints

WANDERING = """
import random
from dataclasses import dataclass

import torch

from rlcore import Algorithm, AlgorithmSpec, hookimpl
from rlcore.ops import masked_sum, objective

RLCORE_API = 1
GRADES = [0.2, 0.1, 0.6, 0.3, 0.5, 0.4, 0.7]

@dataclass(frozen=True)
class Settings:
    pass

def loss(out, batch, config):
    mask = batch["response_mask"]
    return {"policy": objective(-masked_sum(out.log_probs * batch["wandering_weight"][:, None], mask), mask.sum())}

class Wandering(Algorithm):
    '''Weighs its rows by random numbers; its evaluation of step N draws one too, and has the grade GRADES[N].'''

    config_class = Settings

    def step(self, run, prompts):
        batch = run.actor.generate(prompts)
        batch["wandering_weight"] = torch.tensor([random.random() for _ in range(len(batch))])
        return run.actor.update(batch, loss=loss)

    def evaluate(self, run, held_out):
        random.random()
        return {"grade": GRADES[run.step]}

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("wandering", Wandering)
"""
# Evaluations are due at the steps 0, 3 and 6.
OPTIONS = ["algo=wandering", "trainer.eval_every=3", "trainer.best=eval/grade", "trainer.keep_checkpoints=1"]


class Watching(PluginManager):
    """Fails at the end of step `at`, and keeps whether summary.json was there meanwhile."""

    at, summaries = 0, ()

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        self.summaries = (*self.summaries, (run.dir / "summary.json").exists())
        if step == self.at:
            raise RuntimeError("stop here")


@pytest.fixture(scope="module")
def wander(train_small, tmp_path_factory):
    """Train with the wandering algorithm and return the summary."""
    file = tmp_path_factory.mktemp("plugin") / "wandering.py"
    file.write_text(WANDERING)

    def run(folder, *options, at=0):
        plugins = Watching.load([str(file)])
        plugins.at = at
        random.seed(7)  # a run that goes on takes the state of its checkpoint
        summary = train_small(folder, *OPTIONS, *options, plugins=plugins)
        assert not any(plugins.summaries)
        return summary

    return run


@pytest.fixture(scope="module")
def straight(wander, tmp_path_factory):
    """The folder of a run of four steps, and its summary."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, wander(folder, "trainer.total_steps=4")


def state_of(folder: Path) -> dict[str, str]:
    """Return digests of the newest checkpoint: of each tensor of weights and moments, and of each other file."""
    newest = checkpoints(folder / "checkpoints")[-1]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    digests = {name: entry["sha256"] for name, entry in files.items() if name != "trainer.json"}
    for name in [name for name in digests if name.endswith(".safetensors")]:
        del digests[name]  # torch writes the names in an order that differs from run to run
        for key, tensor in load_file(newest / name).items():
            digests[f"{name}/{key}"] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert len(digests) > 100
    return digests


def trained(rows: list[dict]) -> list[dict]:
    """Return the lines of the steps without what evaluations gave."""
    return [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in rows if row["step"]]


def test_two_and_two_steps_are_four(wander, straight, metrics_of, tmp_path):
    """To the bit, though an evaluation drew a random number after step 2 only because that was the last."""
    folder, (other, _) = tmp_path / "run", straight
    assert wander(folder, "trainer.total_steps=2")["best"] == {"step": 2, "value": 0.6}
    summary = wander(folder, "trainer.total_steps=4")
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    assert trained(metrics_of(folder)) == trained(metrics_of(other))
    assert state_of(folder) == state_of(other)
    states = [
        json.loads((run / "checkpoints/step_00000004/trainer.json").read_text())["random"] for run in (folder, other)
    ]
    assert states[0] == states[1]
    # The evaluation of step 2 took place, so its checkpoint stays as the best.
    assert summary["best"] == {"step": 2, "value": 0.6}
    assert os.readlink(folder / "checkpoints" / "best") == "step_00000002"
    assert (folder / "checkpoints" / "best" / "manifest.json").is_file()
    assert "total_steps: 4" in (folder / "config.yaml").read_text()
    assert "goes on after step 2 to step 4; trainer.total_steps was 2" in (folder / "rlcore.log").read_text()


def test_grpo_goes_on_as_one_run(train_small, metrics_of, tmp_path):
    options = ["trainer.eval_every=3", "rollout.response_len=3", "data.eval_size=2"]
    for total in (2, 4):
        train_small(tmp_path / "parts", f"trainer.total_steps={total}", *options)
    train_small(tmp_path / "one", "trainer.total_steps=4", *options)
    assert trained(metrics_of(tmp_path / "parts")) == trained(metrics_of(tmp_path / "one"))
    assert state_of(tmp_path / "parts") == state_of(tmp_path / "one")


def test_a_run_that_goes_on_and_breaks_is_unfinished(wander, straight, metrics_of, tmp_path):
    """The summary of its first end is gone, and its config.yaml has the new length, so it is resumed to that."""
    folder, (other, _) = tmp_path / "run", straight
    wander(folder, "trainer.total_steps=2")
    with pytest.raises(RuntimeError, match="stop here"):
        wander(folder, "trainer.total_steps=4", at=3)
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    saved = folder / "config.yaml"
    assert "total_steps: 4" in saved.read_text()
    assert wander(folder, "trainer.total_steps=4")["steps"] == 4
    assert trained(metrics_of(folder)) == trained(metrics_of(other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["trainer.total_steps=4"],
            r"finished run of 4 steps, and trainer\.total_steps = 4\. To go on, give .* least 5;",
        ),
        (
            ["trainer.total_steps=3"],
            r"finished run of 4 steps, and trainer\.total_steps = 3\. To go on, give .* least 5;",
        ),
        (["trainer.total_steps=5", "trainer.seed=1"], r"holds a run with another config; differing: trainer\.seed\."),
        (
            ["trainer.total_steps=5", "trainer.lower_is_better=[eval/grade]"],
            r"another config; differing: trainer\.lower_is_better\.",
        ),
    ],
)
def test_a_finished_run_goes_on_only_with_more_of_the_same(wander, straight, options, message):
    folder, summary = straight
    with pytest.raises(ConfigError, match=message):
        wander(folder, *options)
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert "total_steps: 4" in (folder / "config.yaml").read_text()


def test_a_finished_run_without_its_checkpoints_does_not_begin_again(wander, straight, tmp_path):
    folder = shutil.copytree(straight[0], tmp_path / "run", symlinks=True)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="holds a finished run without a checkpoint, so it cannot go on"):
        wander(folder, "trainer.total_steps=5")
    assert (folder / "summary.json").exists()


def test_an_unfinished_run_is_not_ended_before_its_checkpoint(wander, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        wander(folder, "trainer.total_steps=6", "trainer.checkpoint_every=2", at=3)
    for total in (1, 2):  # with 2 its last evaluation would be missing
        with pytest.raises(ConfigError, match=rf"reached step 2, and trainer\.total_steps = {total}; give at least 3"):
            wander(folder, f"trainer.total_steps={total}", "trainer.checkpoint_every=2")
    assert wander(folder, "trainer.total_steps=3", "trainer.checkpoint_every=2")["steps"] == 3


def test_a_start_that_fails_leaves_a_finished_run_as_it_was(wander, tmp_path):
    folder = tmp_path / "run"
    wander(folder, "trainer.total_steps=1")
    before = {name: (folder / name).read_bytes() for name in ("summary.json", "config.yaml")}
    state = folder / "checkpoints" / "step_00000001" / "trainer.json"
    manifest = state.with_name("manifest.json")
    whole = state.read_text()
    changed = whole.replace('"digest": "', '"digest": "x')
    assert changed != whole
    state.write_text(changed)
    listed = json.loads(manifest.read_text())
    listed["files"]["trainer.json"] = {
        "bytes": len(changed),
        "sha256": hashlib.sha256(changed.encode()).hexdigest(),
    }
    manifest.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="the training prompts differ"):
        wander(folder, "trainer.total_steps=2")
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_run_that_reached_its_goal_goes_on_to_another(wander, metrics_of, tmp_path):
    """The grade is 0.3 after step 3 and 0.7 after step 6; the run of six steps without a goal is the comparison."""
    folder, other = tmp_path / "run", tmp_path / "other"
    length = "trainer.total_steps=6"
    assert wander(folder, length, "trainer.stop_at={eval/grade: 0.25}")["steps"] == 3
    for goal in ("0.25", "0.3"):
        with pytest.raises(
            ConfigError, match=r"step 3 reached trainer\.stop_at = .* give a trainer\.stop_at beyond that"
        ):
            wander(folder, "trainer.total_steps=9", f"trainer.stop_at={{eval/grade: {goal}}}")
    summary = wander(folder, length, "trainer.stop_at={eval/grade: 0.65}")
    assert (summary["steps"], summary["stopped_at"]) == (6, {"eval/grade": 0.7})
    wander(other, length)
    assert trained(metrics_of(folder)) == trained(metrics_of(other))
    assert state_of(folder) == state_of(other)


def test_a_goal_that_only_the_last_step_reached_does_not_end_a_longer_run(wander, tmp_path):
    """One run would not have been evaluated after step 2."""
    folder, goal = tmp_path / "run", "trainer.stop_at={eval/grade: 0.55}"
    assert wander(folder, "trainer.total_steps=2", goal)["stopped_at"] == {"eval/grade": 0.6}
    summary = wander(folder, "trainer.total_steps=4", goal)
    assert (summary["steps"], summary["stopped_at"]) == (4, None)


def test_a_goal_may_be_dropped_with_the_direction_of_its_metric(wander, tmp_path):
    folder = tmp_path / "run"
    lower = ["trainer.best=null", "trainer.stop_at={eval/grade: 0.25}", "trainer.lower_is_better=[eval/grade]"]
    assert wander(folder, "trainer.total_steps=3", *lower)["steps"] == 0
    assert wander(folder, "trainer.total_steps=3", "trainer.best=null")["steps"] == 3


def test_a_schedule_has_the_new_length_and_says_so(train_small, metrics_of, tmp_path):
    """Linear to 0: of 2 steps 1 and 1/2; then of 4 steps 1/2 and 1/4. By hand."""
    options = ["engine.schedule=linear", "rollout.response_len=2", "engine.lr=1e-3"]
    for total in (2, 4):
        train_small(tmp_path / "run", f"trainer.total_steps={total}", *options)
    assert [row["train/lr"] for row in metrics_of(tmp_path / "run")] == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])
    log = (tmp_path / "run" / "rlcore.log").read_text()
    assert (
        "engine.schedule=linear: the learning rate from step 3 on is that of a run of 4 steps, and that of the steps "
        "before was that of 2" in log
    )


def test_a_link_to_a_best_checkpoint_that_is_not_the_runs_goes(wander, tmp_path):
    """As of step 1 there is no best yet, since every evaluation so far lacked the metric."""
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        wander(folder, "trainer.total_steps=3", "trainer.checkpoint_every=1", at=2)
    saved = folder / "checkpoints" / "step_00000001"
    state = json.loads((saved / "trainer.json").read_text())
    state["goals"]["best"] = None
    (saved / "trainer.json").write_text(json.dumps(state))
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["files"]["trainer.json"]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert (folder / "checkpoints" / "best").is_symlink()
    with pytest.raises(RuntimeError, match="stop here"):
        wander(folder, "trainer.total_steps=3", "trainer.checkpoint_every=1", at=2)
    assert not (folder / "checkpoints" / "best").is_symlink()
