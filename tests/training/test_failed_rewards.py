"""Samples whose reward failed teach nothing, and too many of them end the run. About 20 s."""

import math
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlcore.assets import TINY
from rlcore.cli import main
from rlcore.errors import ConfigError, DataError, RewardsError
from rlcore.plugins import PluginManager

SOMETIMES = """
import itertools

calls = itertools.count()

def one_in_four(prompt, response, answer):
    if next(calls) % 4 == 1:
        raise RuntimeError("the verifier is down")
    return 1.0

def in_turn(prompt, response, answer):
    number = next(calls)
    if number % 4 == 1:
        raise RuntimeError("the verifier is down")
    return float(number % 4 == 0)

def last_of_pairs(prompt, response, answer):
    if next(calls) == 3:
        raise RuntimeError("the verifier is down")
    return 1.0
"""
FOURS = ["algo.group_size=4", "trainer.total_steps=1"]


@pytest.fixture
def reward(tmp_path):
    """Return the overrides of a reward function of SOMETIMES, which starts to count anew."""

    def of(function: str) -> list[str]:
        (tmp_path / "sometimes.py").write_text(SOMETIMES)
        return ["~reward", "reward.functions={}", f"reward.path={tmp_path}/sometimes.py:{function}"]

    return of


@pytest.mark.parametrize(
    "algo",
    [
        ["grpo", "algo.kl_coef=0", *FOURS],
        ["dapo", "algo.max_rounds=1", "algo.overlong_buffer=0", *FOURS],
        ["rloo", "algo.kl_coef=0", *FOURS],
        ["remax", "algo.samples=4", "algo.kl_coef=0", "trainer.total_steps=1", "reward.max_failures=0.5"],
        ["gdpo", "algo.kl_coef=0", *FOURS],
        ["reinforce_pp", "algo.baseline=group", "algo.kl_coef=0", *FOURS],
    ],
    ids=lambda algo: algo[0],
)
def test_where_all_scores_are_equal_a_failure_gives_no_gradient(train_small, metrics_of, reward, tmp_path, algo):
    """Each response that is scored gets 1, and one call in four fails."""
    train_small(tmp_path / "run", f"algo={algo[0]}", *algo[1:], *reward("one_in_four"))
    (metrics,) = metrics_of(tmp_path / "run")
    assert metrics["train/grad_norm"] == 0
    assert (metrics["reward/errors"], metrics["reward/mean"], metrics["health/equal_groups"]) == (2, 1, 1)


def test_the_baseline_is_that_of_the_rows_with_a_reward(train_small, metrics_of, samples_of, reward, tmp_path):
    """Scores of a group: 1, none, 0, 0. The mean of three is 1/3; with error_value=0 the mean of four is 1/4."""
    left_out, counted = tmp_path / "left_out", tmp_path / "counted"
    plain = [*FOURS, "algo.divide_by_std=false", "algo.kl_coef=0", "algo.loss_mean=sequence", *reward("in_turn")]
    train_small(left_out, *plain)
    (metrics,) = metrics_of(left_out)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/dropped_groups"] == 0
    rows = samples_of(left_out)[1]
    assert [row["scores"] for row in rows] == [1.0, None, 0.0, 0.0] * 2
    assert "the verifier is down" in rows[1]["reward_detail"]["cause"]
    train_small(counted, *plain, *reward("in_turn"), "reward.error_value=0")
    (metrics,) = metrics_of(counted)
    assert metrics["reward/mean"] == pytest.approx(1 / 4)
    assert [row["scores"] for row in samples_of(counted)[1]] == [1.0, 0.0, 0.0, 0.0] * 2


def test_a_group_of_which_one_row_is_left_is_dropped_and_counted(train_small, metrics_of, reward, tmp_path):
    """Two groups of two rows; the last row's reward fails."""
    train_small(tmp_path / "run", "algo.group_size=2", "trainer.total_steps=1", *reward("last_of_pairs"))
    (metrics,) = metrics_of(tmp_path / "run")
    assert (metrics["reward/errors"], metrics["reward/dropped_groups"]) == (1, 1)


def test_pass_at_k_drops_groups_with_fewer_than_k_rows(train_small, metrics_of, reward, tmp_path):
    options = ["algo=pass_at_k", "algo.k=4", *FOURS, *reward("in_turn")]
    train_small(tmp_path / "run", *options)
    (metrics,) = metrics_of(tmp_path / "run")
    assert metrics["pass_at_k/dropped_groups"] == 2


BREAKS = """
import os

def score(prompt, response, answer):
    if os.path.exists({mark!r}):
        raise ConnectionError("no route to the verifier")
    return float(len(response))
"""


class Breaking(PluginManager):
    """Breaks the reward after step 2."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 2:
            (run.dir.parent / "down").touch()


@pytest.mark.parametrize("options", [[], ["reward.error_value=0.0", "reward.max_failures=0.9"]])
def test_an_outage_stops_the_run_and_it_goes_on_when_it_is_mended(train_small, metrics_of, tmp_path, options):
    """The same command continues from the state before the failed step, and ends equal to an undisturbed run."""
    (tmp_path / "breaks.py").write_text(BREAKS.format(mark=str(tmp_path / "down")))
    options = [*options, "~reward", "reward.functions={}", f"reward.path={tmp_path}/breaks.py:score"]
    options += ["trainer.total_steps=4", "trainer.eval_every=0"]
    train_small(tmp_path / "plain", *options)
    with pytest.raises(RewardsError, match="all 4 samples of one call have no reward") as caught:
        train_small(tmp_path / "run", *options, plugins=Breaking.load())
    message = str(caught.value)
    assert "breaks.score raised ConnectionError: no route to the verifier; its prompt is '" in message
    assert "', its response is '" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    (tmp_path / "down").unlink()
    train_small(tmp_path / "run", *options)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "plain")


def test_a_run_in_which_every_reward_fails_ends_with_status_1(small, tmp_path, capsys):
    (tmp_path / "down").touch()
    (tmp_path / "breaks.py").write_text(BREAKS.format(mark=str(tmp_path / "down")))
    options = ["algo=grpo", "algo.group_size=2", f"run.dir={tmp_path}/run", f"reward.path={tmp_path}/breaks.py:score"]
    options += ["~reward", "reward.functions={}", "reward.max_failures=1", "trainer.total_steps=2"]
    assert main(["train", *small, *options]) == 1
    assert "all 4 samples of one call have no reward" in capsys.readouterr().err


def test_a_value_for_failures_must_be_a_number(train_small, tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.error_value"):
        train_small(tmp_path / "run", f"reward.error_value={math.inf}")


def test_with_a_judge_the_reward_may_fail_as_nothing_is_learned_from_it(open_small, tmp_path):
    (tmp_path / "down").touch()
    (tmp_path / "breaks.py").write_text(BREAKS.format(mark=str(tmp_path / "down")))
    run, prompts = open_small("~reward", "reward.functions={}", f"reward.path={tmp_path}/breaks.py:score")
    batch = run.actor.generate(prompts)
    scored = batch.union(run.reward(batch, keep_failed=True))
    assert len(scored) == len(prompts)
    assert scored["scores"].isnan().all()
    assert [len(each) for each in run.end_step()[1]] == [len(prompts)]
    run.reward(batch)  # but where it is learned from, also if nobody reads it
    with pytest.raises(RewardsError):
        run.end_step()


def test_scores_meet_only_the_rows_that_they_belong_to(open_small, reward):
    """Six rows, of which one fails; five others than those with a reward are no partner of them."""
    run, prompts = open_small(*reward("last_of_pairs"))
    batch = run.actor.generate(prompts)
    rewards = run.reward(batch)
    assert len(rewards) == 5
    with pytest.raises(DataError, match="both have a column 'uid', with different contents"):
        batch[[1, 2, 3, 4, 5]].union(rewards)
    assert batch.union(rewards)["uid"].tolist() == [uid for row, uid in enumerate(batch["uid"]) if row != 3]


def test_a_column_that_is_not_there_cannot_be_rendered(train_small, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.rendered names 'promt', which no row has.*Did you mean 'prompt'"):
        train_small(tmp_path / "run", "data.rendered=[promt]")
    with pytest.raises(ConfigError, match=r"data\.system_prompt has no place in them"):
        train_small(tmp_path / "run", "data.rendered=[prompt]", "data.system_prompt=Calculate.")


def test_scores_of_a_reward_model_that_are_not_finite_are_failures(train_small, metrics_of, samples_of, tmp_path):
    """The head's weights are so large that some scores overflow."""
    shutil.copytree(TINY, tmp_path / "scorer")
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight, std=3e37)
    model.save_pretrained(tmp_path / "scorer")
    options = [*FOURS, "algo.kl_coef=0", f"reward.model={tmp_path}/scorer", "reward.model_weight=1e-38"]
    with pytest.raises(RewardsError, match=r"8 samples .* no reward.*: reward\.model gave a score that is not"):
        train_small(tmp_path / "stopped", *options, "reward.max_failures=0")
    assert (tmp_path / "stopped" / "checkpoints" / "step_00000000").is_dir()
    failed = {}
    for name, value in (("left_out", []), ("replaced", ["reward.error_value=-1"])):
        train_small(tmp_path / name, *options, "reward.max_failures=1", *value)
        (metrics,) = metrics_of(tmp_path / name)
        failed[name] = [row["scores"] for row in samples_of(tmp_path / name)[1] if row["reward_detail"]]
        assert 0 < metrics["reward/errors"] == len(failed[name]) < 8
        assert math.isfinite(metrics["reward/mean"])
        assert math.isfinite(metrics["train/grad_norm"])
    assert set(failed["left_out"]) == {None}
    assert set(failed["replaced"]) == {-1.0}
