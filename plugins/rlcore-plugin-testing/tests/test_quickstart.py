"""`experiment=quickstart algo=X`: the first run of every algorithm needs no other key. About 10 s."""

import pytest

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.training.preflight import preflight
from rlcore.training.trainer import train

SMALL = ["cluster=in_process", "tracker=none", "data.max_rows=128", "trainer.total_steps=1", "trainer.eval_every=0"]
SMALL += ["data.batch_size=2", "data.max_rows=8"]
ASKS = {
    "on_policy_distill": r"needs a teacher: give either algo\.teacher",
    "safe_rlhf": r"needs the cost of a response",
}
"""Algorithms that need a teacher or a cost from the user, with the beginning of their message."""


def test_every_algorithm_takes_the_place_of_the_quickstarts(algorithm, plugins_of):
    plugins = plugins_of(algorithm)
    config = compose(["experiment=quickstart", f"algo={algorithm}", *SMALL], plugins)
    assert (config.algorithm, config.data.name, config.engine.lr) == (algorithm, "arithmetic", 3e-4)
    if algorithm in ASKS:
        with pytest.raises(ConfigError, match=ASKS[algorithm]):
            preflight(config, plugins)
    else:
        preflight(config, plugins)


@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model", "sft", "ppo"])
def test_those_that_learn_given_responses_find_them(name, plugins_of, tmp_path):
    plugins = plugins_of(name)
    config = compose(["experiment=quickstart", f"algo={name}", *SMALL, f"run.dir={tmp_path / 'run'}"], plugins)
    assert train(config, plugins)["steps"] == 1
