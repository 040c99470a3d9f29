"""Settings with which nothing can be learned are refused, and a run that learned nothing says so. About 4 s."""

import json

import pytest

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["algo=grpo", "rollout.temperature=0"],
            r"rollout\.temperature=0 makes a prompt's responses equal, so .*set it above 0",
        ),
        (["algo=grpo", "rollout.top_k=1"], r"rollout\.top_k=1 makes .* set it above 1, or to 0 for all"),
        (["algo=gspo", "rollout.temperature=0"], r"rollout\.temperature=0 makes a prompt's"),
        (
            ["algo=reinforce_pp", "algo.baseline=group", "algo.group_size=2", "rollout.top_k=1"],
            r"rollout\.top_k=1 makes a prompt's",
        ),
        (["algo=grpo", "roles.actor.rollout={temperature: 0}"], r"role 'actor': rollout\.temperature=0 makes a"),
        (["algo=grpo", "engine.lr=0"], r"learning rate of role 'actor' is 0, so it would never learn; set above 0"),
        (["algo=grpo", "roles.actor.lr=0"], r"learning rate of role 'actor' is 0"),
        (["algo=ppo", "algo.critic_lr=0"], r"learning rate of role 'critic' is 0"),
    ],
)
def test_settings_that_cannot_learn_are_refused(options, message):
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message):
        preflight(compose(["cluster=in_process", *options], plugins), plugins)


@pytest.mark.parametrize(
    "options",
    [
        ["algo=ppo", "rollout.temperature=0"],  # one response of each prompt, compared with the critic's value
        ["algo=rejection_sampling", "rollout.temperature=0", "algo.samples=1", "algo.keep=threshold"],
        ["algo=reinforce_pp", "rollout.top_k=1"],
    ],
)
def test_an_algorithm_that_compares_no_samples_may_be_greedy(options):
    plugins = PluginManager.load()
    preflight(compose(["cluster=in_process", *options], plugins), plugins)


@pytest.fixture(scope="module")
def constant(train_small, tmp_path_factory):
    """Train with a reward function's body in a file that stays the same, and return the summary."""
    file = tmp_path_factory.mktemp("reward") / "reward.py"

    def run(folder, body, *options):
        file.write_text(f"def score(prompt, response, answer):\n    return {body}\n")
        reward = ["~reward", f"reward.path={file}:score"]
        return train_small(folder, *reward, "rollout.response_len=2", "data.shuffle=false", *options)

    return run


def test_a_run_whose_rewards_never_differ_says_so_after_a_resume_too(constant, tmp_path, caplog):
    """Half of them 1 and half of them 0, but equal for a prompt. The message has the file's first prompt."""
    folder, by_prompt = tmp_path / "run", "float(int(answer) % 2)"
    reason = constant(folder, by_prompt, "trainer.total_steps=1")["nothing_learned"]
    assert reason.startswith("the rewards of a prompt's samples were equal in every step")
    assert "prompt '3+4=', response '" in reason
    assert reason.endswith("answer '7', score 1.0")
    assert constant(folder, by_prompt, "trainer.total_steps=2")["nothing_learned"] == reason
    assert json.loads((folder / "summary.json").read_text())["nothing_learned"] == reason
    assert f"nothing was learned: {reason}" in caplog.text


def test_a_difference_before_a_resume_counts(constant, tmp_path):
    folder = tmp_path / "run"
    differ = "float(len(response) + ord(response[0]) if response else 0)"
    assert constant(folder, differ, "trainer.total_steps=1")["nothing_learned"] is None
    assert constant(folder, "0.0", "trainer.total_steps=2")["nothing_learned"] is None


def test_a_run_that_trained_no_row_says_so(constant, tmp_path):
    """Of equal responses' scores none is better, so there is no pair."""
    summary = constant(tmp_path / "run", "0.0", "algo=online_dpo", "algo.group_size=2", "trainer.total_steps=1")
    assert summary["nothing_learned"].startswith("no row was trained in any step. The first sample: prompt '3+4='")


def test_a_warm_up_as_long_as_the_run_is_warned_of(constant, tmp_path, caplog):
    constant(tmp_path / "run", "0.0", "engine.warmup_steps=1", "trainer.total_steps=1")
    assert "engine.warmup_steps = 1 lasts as long as the run of 1 steps" in caplog.text
