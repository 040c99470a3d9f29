"""`trainer.epochs` in place of steps. About 4 s."""

import pytest

from rlcore.config import compose
from rlcore.config.files import read_values
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

# Of the 8 prompts an epoch is 2 batches of 4.
SHORT = ["data.batch_size=4", "rollout.response_len=2"]


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


def uids(samples: dict[int, list[dict]]) -> list[set[str]]:
    return [{row["uid"] for row in samples[step]} for step in sorted(samples)]


def test_an_epoch_is_the_batches_of_the_data_and_further_ones_go_on(train_small, samples_of, tmp_path):
    folder = tmp_path / "run"
    assert train_small(folder, "trainer.epochs=1", *SHORT)["steps"] == 2
    first, second = uids(samples_of(folder))
    assert first | second == {f"0:{row}" for row in range(8)}
    saved = read_values(folder / "config.yaml")["trainer"]
    assert (saved["epochs"], saved["total_steps"]) == (1, 2)
    assert "trainer.epochs=1: 2 steps, 2 in an epoch" in (folder / "rlcore.log").read_text()
    with pytest.raises(
        ConfigError, match=r"of 2 steps, and trainer\.epochs = 1, which are 2 steps\. .* more than 1 tr"
    ):
        train_small(folder, "trainer.epochs=1", *SHORT)
    assert train_small(folder, "trainer.epochs=2", *SHORT)["steps"] == 4
    assert uids(samples_of(folder))[2] < {f"1:{row}" for row in range(8)}
    assert read_values(folder / "config.yaml")["trainer"]["epochs"] == 2


def test_a_smaller_batch_at_the_end_of_an_epoch_counts_unless_it_is_dropped(train_small, tmp_path):
    """8 prompts in batches of 3 are 3 and 3, and 2."""
    short = ["data.batch_size=3", "rollout.response_len=2", "trainer.epochs=1"]
    assert train_small(tmp_path / "all", *short, "data.drop_last=false")["steps"] == 3
    assert train_small(tmp_path / "dropped", *short)["steps"] == 2


def test_both_lengths_are_one_too_many(plugins):
    with pytest.raises(
        ConfigError, match=r"trainer\.total_steps = 7 and trainer\.epochs = 2 are both lengths of the run"
    ):
        compose(["algo=grpo", "trainer.total_steps=7", "trainer.epochs=2"], plugins)
    assert compose(["algo=grpo", "experiment=quickstart", "trainer.epochs=2"], plugins).trainer.epochs == 2


def test_a_saved_config_has_its_number_of_steps_and_may_be_repeated_by_epochs(plugins):
    base = {"algorithm": "grpo", "trainer": {"total_steps": 100, "epochs": None}}
    assert compose(["trainer.epochs=3"], plugins, base=base).trainer.epochs == 3
    by_epochs = {"algorithm": "grpo", "trainer": {"total_steps": 6, "epochs": 3}}
    assert compose([], plugins, base=by_epochs).trainer.epochs == 3
    with pytest.raises(ConfigError, match=r"trainer\.epochs = 3 .*trainer\.epochs=null, where a saved config"):
        compose(["trainer.total_steps=5"], plugins, base=by_epochs)
    again = compose(["trainer.total_steps=5", "trainer.epochs=null"], plugins, base=by_epochs).trainer
    assert (again.total_steps, again.epochs) == (5, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["algo=grpo", "data.mix={a: {data: {name: arithmetic}}, b: {data: {name: arithmetic}}}"],
            r"trainer\.epochs = 1 is not defined for data\.mix.*give trainer\.total_steps",
        ),
        (["algo=dapo"], r"trainer\.epochs = 1 counts one batch .* give trainer\.total_steps"),
    ],
)
def test_where_an_epoch_is_no_number_of_steps_it_is_refused(plugins, options, message):
    with pytest.raises(ConfigError, match=message):
        preflight(compose(["cluster=in_process", "trainer.epochs=1", *options], plugins), plugins)


def test_checks_of_the_number_of_steps_wait_for_the_data(train_small, small, plugins, tmp_path):
    """A warm-up of 150 steps is more than the default of total_steps, and less than some epochs."""
    options = ["algo=ppo", "algo.critic_warmup=150", "trainer.epochs=1"]
    preflight(compose([*small, *options], plugins), plugins)
    with pytest.raises(ConfigError, match=r"algo\.critic_warmup=150 covers all trainer\.total_steps=2"):
        train_small(tmp_path / "run", *options, *SHORT)
    assert not (tmp_path / "run").exists()
