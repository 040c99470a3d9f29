"""Combinations that cannot work are refused before anything starts."""

from typing import Any

import pytest

from rlcore.config import Config
from rlcore.errors import ConfigError
from rlcore.preflight import preflight


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    return config.with_values(
        {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
    )


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "cluster": {"executor": "in_process", "workers": 1},
            "tracker": {"use": []},
            "reward": {"path": "my.py:score"},
        },
        {
            "reward": {"functions": {"exact": 0.5, "dir/my.py:score": -1.0, "arithmetic": 0}},
            "cluster": {"gpus_per_worker": 0.5},
        },
        {"reward": {"functions": {"exact": 0}, "model": "some/folder"}},  # the model scores, the function only counts
    ],
)
def test_a_sound_config_passes(sections, config, plugins):
    preflight(changed(config, **sections), plugins)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "data",
            {"name": "ridles"},
            r"data.name = 'ridles' is not installed. Did you mean 'riddles'\? Installed: arith",
        ),
        ("rollout", {"name": "hff"}, r"rollout.name = 'hff' is not installed. Did you mean 'hf'\?"),
        ("engine", {"name": "torhc"}, r"engine.name = 'torhc' is not installed. Did you mean 'torch'\?"),
        ("tracker", {"use": ["console", "wandbb"]}, r"tracker.use = 'wandbb' is not installed. Did you mean 'wandb'\?"),
        ("reward", {"functions": {"exakt": 1}}, r"reward.functions = 'exakt' is not installed. Did you mean 'exact'\?"),
        ("reward", {"functions": {"exact": 0}}, r"reward.functions has only weights of 0"),
        ("trainer", {"eval_samples": 4, "eval_temperature": 0}, r"eval_samples = 4 greedy responses .* are all equal"),
        ("trainer", {"rollouts_ahead": 1, "importance_cap": 0.0}, "importance_cap = 0 gives every sample the weight 0"),
        ("trainer", {"importance": "sequence", "importance_cap": 0.0}, "with trainer.importance = sequence nothing"),
        ("trainer", {"importance": "mask", "importance_floor": 1.5}, "a band that must have 1 inside it"),
        ("reward", {"functions": {"my.txt:score": 1}}, r"'my.txt:score' must be FILE.py:FUNCTION"),
        ("reward", {"path": "my.py"}, r"reward.path = 'my.py' must be FILE.py:FUNCTION"),
        ("reward", {"path": "my.py:f", "functions": {"exact": 1}}, r"'my.py:f' is used alone.*{my.py\\:f: 1.0}"),
        ("rollout", {"response_len": 8, "min_tokens": 9}, r"min_tokens = 9 is more than rollout.response_len = 8"),
        ("rollout", {"top_p": 0}, r"top_p = 0 leaves no token"),
        ("rollout", {"stop": [""]}, r"rollout.stop holds an empty text"),
        ("engine", {"betas": [0.9]}, r"engine.betas = \[0.9\] must be two numbers"),
        ("engine", {"betas": [0.9, 1.0]}, r"engine.betas = \[0.9, 1.0\] must be two numbers"),
        ("cluster", {"executor": "in_process"}, r"cluster.workers must be 1, not 2: choose cluster=in_process"),
        ("cluster", {"executor": "in_process", "workers": 1, "address": "a:1"}, r"address needs cluster.executor=ray"),
        ("cluster", {"gpus_per_worker": 1.5}, r"gpus_per_worker = 1.5 must be a whole number or a share below 1"),
        ("rollout", {"response_len": 2}, r"algo.group_size is more than rollout.response_len"),
        ("run", {"name": "forbidden"}, r"stand_in forbids run.name = 'forbidden'"),
    ],
)
def test_impossible_combinations(section, values, message, config, plugins):
    with pytest.raises(ConfigError, match=message):
        preflight(changed(config, **{section: values}), plugins)
