"""The best checkpoint of a run, and a run that ends early; both go on after an interruption. About 8 s."""

import json
import math
import os
import shutil

import pytest

from rlcore.commands.eval import target_values
from rlcore.config import compose
from rlcore.config.schema import TrainerConfig
from rlcore.errors import CheckpointError, ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.checkpoint import checkpoints, chosen_whole
from rlcore.training.goals import Goals
from rlcore.training.preflight import preflight

GRADED = """
from dataclasses import dataclass

from rlcore import Algorithm, AlgorithmSpec, hookimpl
from rlcore.ops import masked_sum, objective

RLCORE_API = 1
GRADES = [0.2, 0.1, 0.5, 0.3, 0.5, 0.4]

@dataclass(frozen=True)
class Settings:
    pass

def loss(out, batch, config):
    mask = batch["response_mask"]
    return {"policy": objective(-masked_sum(out.log_probs, mask), mask.sum())}

class Graded(Algorithm):
    '''Its evaluation of step N has the grade GRADES[N].'''

    config_class = Settings

    def step(self, run, prompts):
        return run.actor.update(run.actor.generate(prompts), loss=loss)

    def evaluate(self, run, held_out):
        return {"grade": GRADES[run.step], "loss": 1 - GRADES[run.step]}

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("graded", Graded)
"""
OPTIONS = ["algo=graded", "trainer.total_steps=5", "trainer.eval_every=1", "trainer.keep_checkpoints=1"]


class StopsAfter(PluginManager):
    """Fails at the end of step `at`."""

    at = 0

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == self.at:
            raise RuntimeError("stop here")


@pytest.fixture(scope="module")
def graded(train_small, tmp_path_factory):
    """Train with the graded algorithm and return the summary."""
    file = tmp_path_factory.mktemp("plugin") / "graded.py"
    file.write_text(GRADED)

    def run(folder, *options, at=0):
        plugins = StopsAfter.load([str(file)])
        plugins.at = at
        return train_small(folder, *OPTIONS, *options, plugins=plugins)

    return run


def steps_of(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoints(folder / "checkpoints")]


@pytest.fixture(scope="module")
def straight(graded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    summary = graded(folder, "trainer.best=eval/grade")
    assert summary["best"] == {"step": 2, "value": 0.5}
    return folder


def test_the_best_checkpoint_stays_beside_the_newest(straight):
    """Of steps 2 and 4, which are equal, the first. Checkpoints of the steps 0 and 2 were written as the best."""
    assert steps_of(straight) == [2, 5]
    best = straight / "checkpoints" / "best"
    assert os.readlink(best) == "step_00000002"
    assert chosen_whole(best) == (straight / "checkpoints" / "step_00000002").resolve()
    assert chosen_whole(straight) == straight / "checkpoints" / "step_00000005"
    assert target_values(str(best))["trainer"]["best"] == "eval/grade"


def test_a_damaged_best_checkpoint_is_not_replaced_by_another(straight, tmp_path):
    folder = shutil.copytree(straight, tmp_path / "run", symlinks=True)
    state = folder / "checkpoints" / "best" / "trainer.json"
    state.write_text(state.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"step_00000002 is damaged: trainer\.json has"):
        chosen_whole(folder / "checkpoints" / "best")


@pytest.mark.parametrize("at", [1, 4])
def test_the_best_survives_a_resume(graded, straight, metrics_of, tmp_path, at):
    """Broken after step 1 the run goes on from step 0, and after step 4 from the best, step 2."""
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        graded(folder, "trainer.best=eval/grade", at=at)
    assert steps_of(folder) == [{1: 0, 4: 2}[at]]
    (folder / "checkpoints" / "best").unlink()
    summary = graded(folder, "trainer.best=eval/grade")
    assert summary["best"] == {"step": 2, "value": 0.5}
    assert steps_of(folder) == [2, 5]
    assert os.readlink(folder / "checkpoints" / "best") == "step_00000002"
    assert metrics_of(folder) == metrics_of(straight)


def test_a_best_checkpoint_that_was_deleted_is_forgotten(graded, tmp_path, caplog):
    """Step 2, a new best, deletes the best of step 0; damaged, it sends the run back to step 1, which names step 0."""
    folder, options = tmp_path / "run", ["trainer.best=eval/grade", "trainer.checkpoint_every=1"]
    options.append("trainer.keep_checkpoints=2")
    with pytest.raises(RuntimeError, match="stop here"):
        graded(folder, *options, at=3)
    assert steps_of(folder) == [1, 2]
    (folder / "checkpoints" / "step_00000002" / "trainer.json").write_text("{}")
    with pytest.raises(RuntimeError, match="stop here"):
        graded(folder, *options, at=2)
    assert "the best checkpoint as of step 1, " in caplog.text
    assert "step_00000000, is not whole: it has been deleted; the best is chosen anew" in caplog.text
    assert not (folder / "checkpoints" / "best").is_symlink()  # step 2 is the best again, but broke before it was saved
    assert graded(folder, *options)["best"] == {"step": 2, "value": 0.5}
    assert os.readlink(folder / "checkpoints" / "best") == "step_00000002"


def test_a_checkpoint_of_a_version_without_goals_has_none_yet(graded, forget, tmp_path):
    """Its trainer's state lacks the key: the best is then the best of the steps after it, here step 4 of 3 to 5."""
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        graded(folder, "trainer.best=eval/grade", at=4)
    state = folder / "checkpoints" / "step_00000002" / "trainer.json"
    state.write_text(json.dumps({key: value for key, value in json.loads(state.read_text()).items() if key != "goals"}))
    forget(state.parent, state.name)
    assert graded(folder, "trainer.best=eval/grade")["best"] == {"step": 4, "value": 0.5}


def test_less_is_better_where_the_config_says_so(graded, tmp_path):
    lower = "trainer.lower_is_better=[eval/loss]"
    summary = graded(tmp_path / "run", "trainer.best=eval/loss", lower, "trainer.stop_at={eval/loss: 0.6}")
    assert (summary["best"], summary["stopped_at"]) == ({"step": 2, "value": 0.5}, {"eval/loss": 0.5})
    assert (summary["status"], summary["steps"]) == ("finished", 2)


def test_a_run_that_reached_its_goal_does_not_go_on(graded, metrics_of, tmp_path):
    folder, goal = tmp_path / "run", "trainer.stop_at={eval/grade: 0.25, eval/loss: 0.6}"
    summary = graded(folder, goal)
    # Step 3 is the first whose grade is at least 0.25 and whose loss is at least 0.6.
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["stopped_at"] == {"eval/grade": 0.3, "eval/loss": 0.7}
    assert steps_of(folder) == [3]
    before = metrics_of(folder)
    assert [row["step"] for row in before] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="holds a finished run"):
        graded(folder, goal)
    (folder / "summary.json").unlink()  # as if the process had been killed before it was written
    summary = graded(folder, goal)
    assert (summary["status"], summary["steps"], summary["stopped_at"]["eval/grade"]) == ("finished", 3, 0.3)
    assert metrics_of(folder) == before


def test_an_unknown_metric_of_an_evaluation_of_its_own_ends_the_run_before_its_first_step(graded, metrics_of, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"trainer\.best names 'eval/grades', which no evaluation of this run gives\. Did you mean 'eval/grade'\? "
        r"There are eval/grade, eval/loss$",
    ):
        graded(tmp_path / "run", "trainer.best=eval/grades")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["trainer.best=eval/acuracy"], r"trainer\.best names 'eval/acuracy', .* Did you mean 'eval/accuracy'\?"),
        (
            ["trainer.stop_at={eval/pass@4: 0.5}"],
            r"trainer\.stop_at names 'eval/pass@4', .*needs trainer\.eval_samples",
        ),
        (
            ["trainer.best=eval/accuracy", "trainer.eval_every=0"],
            r"trainer\.best needs evaluations, but trainer\.eval_e",
        ),
        (
            ["trainer.lower_is_better=[eval/score]"],
            r"names 'eval/score', which is neither trainer\.best nor in .*no metric",
        ),
        (["trainer.stop_at={eval/accuracy: 90}"], r"stop_at\.eval/accuracy = 90: it is a share of 0 to 1; 90"),
        (["trainer.stop_at={eval/accuracy_low: -0.1}"], r"eval/accuracy_low = -0\.1: it is a share of 0 to 1"),
        (["trainer.stop_at={eval/a/truncated: 5}", "eval.sets={a: {}}"], r"eval/a/truncated = 5: it is a share"),
        (["trainer.stop_at={eval/score: inf}"], r"eval/score = inf is never reached; give a number"),
        (["trainer.stop_at={eval/score: nan}"], r"trainer\.stop_at\.eval/score = nan "),
        (["trainer.stop_at={eval/accuracy: high}"], r"trainer\.stop_at\.eval/accuracy = 'high' has the wrong type"),
    ],
)
def test_goals_are_checked_before_anything_starts(options, message):
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message):
        preflight(compose(["algo=grpo", "cluster=in_process", *options], plugins), plugins)


def test_maj_at_k_is_no_goal_where_no_reward_extracts_answers(train_small, tmp_path):
    (tmp_path / "plain.py").write_text("def score(prompt, response, answer):\n    return 1.0\n")
    options = ["trainer.best=eval/maj@2", "trainer.eval_samples=2", "trainer.eval_every=1"]
    with pytest.raises(
        ConfigError, match=r"trainer\.best names 'eval/maj@2', .*a reward that extracts answers\. There are"
    ):
        train_small(tmp_path / "run", *options, "~reward", f"reward.path={tmp_path / 'plain.py'}:score")
    assert not (tmp_path / "run").exists()


def test_a_metric_that_is_missing_at_first_ends_the_run_only_if_nobody_could_check_it(caplog):
    """Failed rewards leave out pass@k. The names of an algorithm's own evaluation are known at step 0 only."""
    metrics = {"eval/accuracy": 0.5, "eval/a/samples": 4.0}
    goals = Goals(TrainerConfig(best="eval/pass@4"))
    goals.judge(0, metrics)
    assert "step 0: the evaluation gave no eval/pass@4, so it is not judged by it" in caplog.text
    with pytest.raises(ConfigError, match=r"trainer\.best names 'eval/pass@4', which no evaluation of this run gives"):
        goals.judge(0, metrics, by_algorithm=True)
    Goals(TrainerConfig(best="eval/a/pass@4")).judge(0, metrics, by_algorithm=True)  # the set gave its others


def test_nan_and_a_lacking_metric_are_never_the_best(caplog):
    goals = Goals(TrainerConfig(best="eval/x", stop_at={"eval/x": -1.0}))
    goals.judge(0, {"eval/x": math.nan})
    assert (goals.best, goals.reached) == (None, None)
    goals.judge(1, {"eval/x": -2.0})
    goals.judge(2, {"eval/x": math.nan})
    goals.judge(3, {"eval/y": 3.0})
    assert (goals.best, goals.reached) == ({"step": 1, "value": -2.0}, None)
    assert "step 3: the evaluation gave no eval/x" in caplog.text
    goals.judge(4, {"eval/x": -1.0})
    assert (goals.best, goals.reached) == ({"step": 4, "value": -1.0}, {"eval/x": -1.0})
